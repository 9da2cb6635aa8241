"""Any pipeline on a device: a template per shape, filled with the rules of its stages. Knows no stage."""
