// What the colours of the ribbon mean: seven classes from expected to surprising, each with its numbers.

const CLASSES = 7;

function rising(bounds) {
  return (x) => bounds.filter((bound) => x >= bound).length;
}

function falling(bounds) {
  return (x) => bounds.filter((bound) => x < bound).length;
}

function risingLabels(bounds, unit) {
  return [`< ${bounds[0]}`, ...bounds.map((low, i) => (i + 1 < bounds.length ? `${low} – ${bounds[i + 1]}` : `≥ ${low}`))].map(
    (label) => label + unit,
  );
}

const NATS = [0.1, 0.5, 1, 2, 3, 5];
const ODDS = [0.9, 0.5, 0.2, 0.1, 0.05, 0.01];
const ODDS_LABELS = ["≥ 90%", "50 – 90%", "20 – 50%", "10 – 20%", "5 – 10%", "1 – 5%", "< 1%"];

/** The quantities by name: label, help, the number of a token, its class (0 to 6), and the labels of the classes. */
export const METRICS = {
  surprisal: {
    label: "Surprisal",
    help: "−ln of the probability the model gives the token, before all stages, in nats",
    value: (t) => t.surprisal,
    level: rising(NATS),
    labels: risingLabels(NATS, ""),
  },
  probability: {
    label: "Model probability",
    help: "Probability of the token in the model's distribution, before all stages",
    value: (t) => t.model_probability,
    level: falling(ODDS),
    labels: ODDS_LABELS,
  },
  sampled: {
    label: "Sampling probability",
    help: "Probability of the token in the distribution it was sampled from, after all stages",
    value: (t) => t.probability,
    level: falling(ODDS),
    labels: ODDS_LABELS,
  },
  entropy: {
    label: "Entropy",
    help: "Entropy of the model's distribution at this step, before all stages, in nats",
    value: (t) => t.entropy,
    level: rising(NATS),
    labels: risingLabels(NATS, ""),
  },
  rank: {
    label: "Rank",
    help: "Position of the token among all tokens, by the model's probability",
    value: (t) => t.rank,
    level: rising([2, 3, 6, 11, 51, 101]),
    labels: ["1", "2", "3 – 5", "6 – 10", "11 – 50", "51 – 100", "> 100"],
  },
  likeliest: {
    label: "Not the likeliest",
    help: "Tokens that greedy decoding would not have chosen",
    value: (t) => (t.rank === null ? null : Number(t.rank > 1)),
    level: (x) => (x ? 4 : 0),
    labels: ["likeliest", null, null, null, "another token"],
  },
};

/** The class of a token, or null if it has no number (a forced token). */
export function levelOf(metric, t) {
  const value = METRICS[metric].value(t);
  return value === null || value === undefined ? null : METRICS[metric].level(value);
}

/** The number of tokens in each class. */
export function histogram(metric, tokens) {
  const counts = new Array(CLASSES).fill(0);
  for (const t of tokens) {
    const level = levelOf(metric, t);
    if (level !== null) counts[level] += 1;
  }
  return counts;
}

/** The upper tail of the chi-square distribution. */
export function chiSquareTail(x, degrees) {
  const a = degrees / 2;
  const z = x / 2;
  if (z <= 0) return 1;
  const front = Math.exp(a * Math.log(z) - z - logGamma(a));
  if (z < a + 1) {
    let [term, sum] = [1 / a, 1 / a];
    for (let n = 1; n < 1000 && term > sum * 1e-14; n += 1) sum += term *= z / (a + n);
    return Math.max(0, 1 - front * sum);
  }
  let [b, c] = [z + 1 - a, 1e300];
  let d = 1 / b;
  let value = d;
  for (let n = 1; n < 1000; n += 1) {
    const step = -n * (n - a);
    b += 2;
    d = 1 / (step * d + b);
    c = b + step / c;
    value *= d * c;
    if (Math.abs(d * c - 1) < 1e-14) break;
  }
  return front * value;
}

function logGamma(x) {
  let shift = 0;
  let y = x;
  for (; y < 8; y += 1) shift -= Math.log(y);
  const inverse = 1 / (y * y);
  const series = (1 / 12 - inverse * (1 / 360 - inverse * (1 / 1260 - inverse / 1680))) / y;
  return shift + (y - 0.5) * Math.log(y) - y + 0.5 * Math.log(2 * Math.PI) + series;
}
