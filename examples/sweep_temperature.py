"""A sweep: how diverse and how likely texts are at each temperature, with min-p and without.

Every setting continues the same prompts with the same seeds, as one batch. With a file name as argument, it also
writes a plot (PNG, SVG or PDF), which needs matplotlib: ``python examples/sweep_temperature.py sweep.svg``.
Prints a row per temperature: distinct-2 and mean log-likelihood per token, of each series with 95 % intervals.
"""

import sys

import nucleate as nc

TEMPERATURES = (0.3, 0.6, 0.9, 1.2, 1.5)
SERIES = {"all tokens": {}, "min_p=0.1": {"min_p": 0.1}}
METRICS = {"distinct_2": "distinct-2", "log_likelihood": "log-likelihood per token (nats)"}
PROMPTS = ["Once upon a time", "The little dog", "One rainy day", "Tim and Lily"]

settings = {
    f"{name} T={temperature}": {"temperature": temperature, **fields}
    for name, fields in SERIES.items()
    for temperature in TEMPERATURES
}
llm = nc.LLM(generation_config="none")  # not the recommended top-k and top-p
found = nc.compare(llm, settings, PROMPTS, seeds=4, max_tokens=32)

print(f"{'T':>4}", *(f"{f'{metric}, {name}':>28}" for name in SERIES for metric in METRICS))
for temperature in TEMPERATURES:
    cells = [
        "{:.3f} ({:.3f} to {:.3f})".format(*found.estimates[f"{name} T={temperature}"][metric])
        for name in SERIES
        for metric in METRICS
    ]
    print(f"{temperature:4}", *(f"{cell:>28}" for cell in cells))

if len(sys.argv) > 1:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "nucleate"  # the same file each time
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    for axes, (metric, label) in zip(figure.subplots(1, len(METRICS)), METRICS.items(), strict=True):
        for name in SERIES:
            points = [found.estimates[f"{name} T={temperature}"][metric] for temperature in TEMPERATURES]
            axes.plot(TEMPERATURES, [mean for mean, _, _ in points], "o-", label=name)
            axes.fill_between(TEMPERATURES, [low for _, low, _ in points], [high for _, _, high in points], alpha=0.2)
        axes.set(xlabel="temperature", ylabel=label)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    figure.savefig(sys.argv[1], metadata={"Date": None} if sys.argv[1].endswith(".svg") else None)
