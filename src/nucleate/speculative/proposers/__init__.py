"""Draft methods: each proposes tokens that the model verifies."""
