"use strict";
// The atlas: plans from the planner's figures. Computing first, then numbers as `zero-recipes plan` writes them, then
// the page. Memory in bytes, times in seconds. benchmarks/atlas.py says what the figures are.

const figures = JSON.parse(document.getElementById("figures").textContent);
const DEFAULTS = { model: "qwen3-8b", method: "full", gpu: "h100-80gb", gpus: 8, length: 2048, batch: "best", price: 2.5,
                   currency: "usd", sort: "strategy", row: "", compare: "gpus" };
const BATCHES = [1, 2, 4, 8, 16, 32, 64];
const CURRENCIES = { usd: "$", eur: "€", gbp: "£", cny: "¥", inr: "₹" };
const SORTS = { strategy: "strategy", memory: "GPU memory", time: "time of a step", price: "price of a token" };
const COMPARED = { gpus: "numbers of GPUs", gpu: "cards", method: "methods", length: "tokens of a row", model: "models" };
const VERDICTS = { fits: "fits", tight: "may run out", no: "does not fit" };
const SIGNS = { fits: "✓", tight: "!", no: "✕" };

// ---- plans

// The terms of a model that trains in one way: undefined for a model without it.
const termsOf = (choice) => figures.models[choice.model].methods[choice.method];

// The row lengths that a model has positions for.
const lengthsOf = (model) => {
  const positions = figures.models[model].positions || Infinity;
  return figures.lengths.filter((length) => length <= positions);
};

// Which published times a time is compared with: cost.py `regime_of`.
function regimeOf(choice, strategy, tokens) {
  if (figures.strategies[strategy].offloads) return "offload";
  if (choice.gpus > figures.per_node) return "several machines";
  return tokens >= figures.accuracy.long_pass ? "one machine, long passes" : "one machine, short passes";
}

// What of a plan no published time is for: cost.py `without_rows`.
function lackingOf(choice, strategy, tokens) {
  const { stage } = figures.strategies[strategy];
  const name = stage === undefined ? strategyText({ strategy }, choice.gpus) : `zero${stage}`;
  const card = `${name} on ${choice.gpu}`;
  const needed = [card, choice.method === "full" ? "full fine-tuning" : choice.method];
  if (choice.length >= figures.accuracy.long_row) needed.push(`${card} over rows of 16k tokens`);
  const covered = figures.accuracy.kinds[regimeOf(choice, strategy, tokens)];
  return needed.filter((kind) => !covered.includes(kind)).sort();
}

// What the ranges of a time are worth: cost.py `how_good`.
function howGood(choice, row) {
  const tokens = row.batch * choice.length;
  const regime = regimeOf(choice, row.strategy, tokens);
  const [rows, likely, whole] = figures.accuracy.holds[regime].slice(-3);
  const lacking = lackingOf(choice, row.strategy, tokens).join(", ");
  const ending = lacking ? `; none is for ${lacking}: ${figures.accuracy.wider} times wider` : "";
  return `${likely} of ${rows} published times (${regime}) are in the likely range, ${whole} in the whole${ending}.`;
}

// What a strategy needs and how long it takes with so many rows in a micro batch; null where it is not planned.
function planOf(choice, strategy, batch) {
  const method = termsOf(choice);
  const terms = method.strategies && method.strategies[strategy];
  const among = terms ? terms.counts.indexOf(choice.gpus) : -1;
  if (among < 0) return null;
  const term = (name) => (Array.isArray(terms[name]) ? terms[name][among] : terms[name] || 0);
  const gpu = figures.gpus[choice.gpu];
  const place = figures.counts.indexOf(choice.gpus);
  const tokens = batch * choice.length;

  const allocated = Math.max(term("peak") + terms.a_token * tokens, term("step")) + gpu.workspace;
  const several = choice.gpus > 1 ? 1 : 0;
  const needed = allocated + figures.memory.beside[several];
  const shown = Math.min(allocated * figures.memory.factor + figures.memory.shown[several], gpu.memory);
  const host = term("host");
  const usualHost = gpu.usual_host[place];
  let onCard = "tight";
  if (needed > gpu.memory) onCard = "no";
  else if (allocated + Math.trunc(allocated * figures.memory.unplanned) <= gpu.usable) onCard = "fits";
  const status = onCard === "fits" && host > usualHost ? "tight" : onCard;

  const flops = method.flops[figures.lengths.indexOf(choice.length)][Object.keys(figures.gpus).indexOf(choice.gpu)];
  const computing = batch * flops + (term("moved") + terms.moved_a_token * tokens) / gpu.memory_gb_s;
  const link = gpu.link_gb_s[place];
  let communicating = term("calls") + term("sent") / link;
  if (term("hidden")) {
    const bare = term("bare_calls") + term("bare_sent") / link;
    communicating = Math.max(bare, communicating - term("hidden") * computing);
  }
  const waiting = Math.max(0, term("hosting") - computing - communicating);
  const offloading = term("offload") + term("to_host") / gpu.host_gb_s;
  const beside = computing + communicating + waiting;
  const factors = figures.spread.tokens[tokens];
  const points = [0, 1, 2].map((point) => factors[point] * beside + figures.spread.offload[point] * offloading);
  const [narrowLow, narrowHigh, middle] = points;
  const wider = lackingOf(choice, strategy, tokens).length ? figures.accuracy.wider : 1;
  const low = narrowLow / wider;
  const high = narrowHigh * wider;
  const seconds = [low, high];
  const factor = Math.sqrt(figures.spread.likely_width);
  const likely = [Math.max(low, middle / factor), Math.min(high, middle * factor)];
  const perStep = tokens * choice.gpus;
  const price = (time) => (time * choice.price * choice.gpus) / 3600 / perStep * 1e6;
  return {
    strategy, batch, needed, shown, host, usualHost, onCard, status, seconds, likely, middle,
    margin: gpu.memory - needed,
    capacity: gpu.memory,
    secondsAToken: middle / perStep,
    gpuSecondsAToken: (choice.gpus * middle) / perStep,
    rate: perStep / middle,
    prices: seconds.map(price),
  };
}

// The smallest micro batch that is nearly as fast as the fastest that fits: choose.py `better`.
function proposed(choice, plan) {
  if (!plan || plan.status !== "fits") return plan;
  const able = [];
  for (let batch = 2; batch * choice.gpus <= figures.most_rows; batch *= 2) {
    const larger = planOf(choice, plan.strategy, batch);
    if (larger.status === "fits" && larger.secondsAToken <= figures.gain * plan.secondsAToken) able.push(larger);
  }
  const fastest = Math.min(...able.map((larger) => larger.secondsAToken));
  return able.find((larger) => larger.secondsAToken <= fastest / figures.gain) || plan;
}

// The strategy to run of those that `plan` names by itself: choose.py `recommend`. Null where nothing fits.
function recommended(plans, gpus) {
  const kind = (plan) => figures.strategies[plan.strategy];
  const some = (chosen, others) => (chosen.length ? chosen : others);
  let fitting = plans.filter((plan) => plan.status !== "no" && kind(plan).usual);
  if (!fitting.length) return null;
  fitting = some(fitting.filter((plan) => plan.host <= plan.usualHost), fitting);
  fitting.sort((one, other) => kind(one).order - kind(other).order);
  const here = fitting.filter((plan) => kind(plan).place === kind(fitting[0]).place);
  const sure = here.filter((plan) => plan.status === "fits");
  const sharing = sure.filter((plan) => gpus > 1 || !kind(plan).shares_nothing);
  const candidates = some(sharing, some(sure, here));
  const fastest = candidates.reduce((best, plan) => (plan.middle < best.middle ? plan : best));
  const asFast = candidates.filter((plan) => plan.middle <= fastest.seconds[1]);
  if (sure.length) return asFast[0];
  return asFast.reduce((best, plan) => (plan.margin > best.margin ? plan : best));
}

// All strategies as they are shown, and the one to run: {rows, best}.
function plansOf(choice) {
  const asked = choice.batch === "best" ? 1 : choice.batch;
  const plans = Object.keys(figures.strategies).map((strategy) => planOf(choice, strategy, asked)).filter(Boolean);
  const chosen = recommended(plans, choice.gpus);
  const worth = (plan) => choice.gpus > 1 || !figures.strategies[plan.strategy].shares_nothing || plan === chosen;
  const rows = plans.filter(worth).map((plan) => (choice.batch === "best" ? proposed(choice, plan) : plan));
  return { rows, best: (chosen && rows.find((row) => row.strategy === chosen.strategy)) || null };
}

// The roomiest of plans that do not fit.
const roomiest = (rows) => rows.reduce((best, row) => (row.margin > best.margin ? row : best), rows[0]);

// ---- numbers, as zero_recipes/core/units.py writes them

const grouped = (value, digits = 0) =>
  value.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });

const gigabytes = (bytes) => grouped(bytes / 1e9, bytes < 1e11 ? 1 : 0);

const significant = (value) => {
  if (!value) return "0";
  const digits = 2 - Math.floor(Math.log10(Math.abs(value)));
  return value.toFixed(Math.min(Math.max(digits, 0), 6));
};

const count = (value) => (value >= 1000 ? grouped(value) : significant(value));

const aboutRate = (row) => count(Number(row.rate.toPrecision(3)));

function inSeconds(seconds) {
  if (seconds < 0.0995) return `${(1000 * seconds).toFixed(0)} ms`;
  if (seconds < 0.995) return `${seconds.toFixed(2)} s`;
  if (seconds < 20) return `${seconds.toFixed(1)} s`;
  return `${grouped(seconds)} s`;
}

function money(value) {
  if (value >= 1000) return grouped(value);
  if (value >= 0.1) return grouped(value, 2);
  return value > 0 && value < 0.0005 ? "<0.001" : grouped(value, 3);
}

const priceText = (choice, row) => `${CURRENCIES[choice.currency]} ${between(row.prices, money)}`;

// A range, with the unit once where both ends have the same.
function between([low, high], written) {
  let first = written(low);
  const last = written(high);
  if (first === last) return last;
  const [number, unit] = first.split(" ");
  if (unit && last.endsWith(` ${unit}`)) first = number;
  return `${first} - ${last}`;
}

const hostText = (row) => gigabytes(row.host) + (row.host > row.usualHost ? ` > ${gigabytes(row.usualHost)}` : "");

const strategyText = (row, gpus) => (gpus === 1 && row.strategy === "ddp" ? "single" : row.strategy);

// ---- commands

const quoted = (words) => words.filter(Boolean).join(" ");

function planCommand(choice, row) {
  const own = row && !figures.strategies[row.strategy].usual;
  return quoted([
    `zero-recipes plan ${choice.model} --gpus ${choice.gpus} --gpu ${choice.gpu}`,
    own && `--strategies ${row.strategy}`,
    choice.price > 0 && `--price ${choice.price}`,
    `--max_length ${choice.length}`,
    termsOf(choice).words,
    choice.batch !== "best" && `--per_device_train_batch_size ${choice.batch}`,
  ]);
}

function trainCommand(choice, row) {
  const name = strategyText(row, choice.gpus);
  return quoted([
    "zero-recipes train RECIPE.yaml",
    name !== "single" && `--config_file ${name}.yaml`,
    `--num_processes ${choice.gpus}`,
    choice.gpus > figures.per_node && "--hosts HOST,HOST --machine_rank K",
    `--model_name_or_path ${figures.models[choice.model].name}`,
    `--max_length ${choice.length}`,
    termsOf(choice).words,
    row.batch > 1 && `--per_device_train_batch_size ${row.batch}`,
    termsOf(choice).strategies[row.strategy].words,
  ]);
}

// ---- the choice, which the address holds

// Read a choice from the part of an address behind #. What it has not, or what is unknown, is as usual: {choice, notes}.
function choiceOf(hash) {
  const given = new URLSearchParams(hash.replace(/^#/, ""));
  const notes = [];
  const known = {
    model: Object.keys(figures.models), method: figures.methods, gpu: Object.keys(figures.gpus),
    gpus: figures.counts, length: figures.lengths, batch: ["best", ...BATCHES], sort: Object.keys(SORTS),
    row: ["", ...Object.keys(figures.strategies)], compare: Object.keys(COMPARED), currency: Object.keys(CURRENCIES),
  };
  const choice = { ...DEFAULTS };
  if (!(choice.model in figures.models)) choice.model = known.model[0];
  for (const [key, values] of Object.entries(known)) {
    if (!given.has(key)) continue;
    const value = values.find((one) => String(one) === given.get(key));
    if (value === undefined) notes.push(`The address has ${key} "${given.get(key)}", which the atlas does not know.`);
    else choice[key] = value;
  }
  const price = Number(given.get("price") ?? DEFAULTS.price);
  choice.price = price >= 0 && price < Infinity ? price : DEFAULTS.price;
  const lengths = lengthsOf(choice.model);
  if (!lengths.includes(choice.length)) {
    const positions = grouped(figures.models[choice.model].positions);
    notes.push(`${choice.model} has ${positions} positions, so rows of ${grouped(choice.length)} tokens are too long for it.`);
    choice.length = lengths[lengths.length - 1];
  }
  return { choice, notes };
}

const addressOf = (choice) => `#${new URLSearchParams(choice)}`;

// ---- the page

const at = (id) => document.getElementById(id);

// A narrow window shows the parts of a table below each other: by these roles they stay a table.
const ROLES = { tr: "row", td: "cell", th: "rowheader" };

// An element with attributes and children; text is never read as HTML.
function made(tag, attributes, ...children) {
  const element = document.createElement(tag);
  if (tag in ROLES) element.setAttribute("role", ROLES[tag]);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function fill(id, options, chosen) {
  const made = Object.entries(options).map(([value, text]) => new Option(text, value, false, value === String(chosen)));
  at(id).replaceChildren(...made);
}

// {value: text}
const textsOf = (values, text) => Object.fromEntries(values.map((value) => [value, text(value)]));

function modelText(model) {
  const parameters = figures.models[model].parameters;
  const size = parameters < 1e9 ? `${significant(parameters / 1e6)}M` : `${significant(parameters / 1e9)}B`;
  return `${model}, ${size}`;
}

function showChoice(choice) {
  const gpuText = (gpu) => `${gpu}, ${gigabytes(figures.gpus[gpu].memory)} GB`;
  fill("model", textsOf(Object.keys(figures.models), modelText), choice.model);
  fill("method", textsOf(figures.methods, (name) => (name === "full" ? "full fine-tuning" : name)), choice.method);
  fill("gpu", textsOf(Object.keys(figures.gpus), gpuText), choice.gpu);
  fill("gpus", textsOf(figures.counts, String), choice.gpus);
  fill("length", textsOf(lengthsOf(choice.model), grouped), choice.length);
  at("batch").replaceChildren(
    new Option("as plan proposes", "best", false, choice.batch === "best"),
    ...BATCHES.map((size) => new Option(String(size), size, false, choice.batch === size)),
  );
  fill("sort", SORTS, choice.sort);
  fill("compare", COMPARED, choice.compare);
  fill("currency", CURRENCIES, choice.currency);
  at("price").value = choice.price;
}

const verdictOf = (row) => made("span", { class: `verdict ${row.status}` }, `${SIGNS[row.status]} ${VERDICTS[row.status]}`);

function memoryOf(row) {
  const whole = 1.3 * row.capacity;
  const width = Math.min(100, (100 * row.needed) / whole);
  const bar = made("div", { class: "bar", "aria-hidden": "true" },
    made("i", { class: row.onCard, style: `width:${width}%` }),
    made("b", { style: `left:${(100 * row.capacity) / whole}%` }));
  return [`${gigabytes(row.needed)} of ${gigabytes(row.capacity)} GB`, bar];
}

const cell = (head, ...children) => made("td", { class: "number", "data-head": head }, ...children);

// Host memory: in the colour of what may run out where it is beyond what is usual.
function hostOf(row) {
  const element = cell("Host GB", hostText(row));
  if (row.host > row.usualHost && row.status !== "no") element.classList.add("beyond");
  return element;
}

function showStrategies(choice, rows, best, chosen) {
  const values = {
    memory: (row) => row.needed, time: (row) => row.middle, price: (row) => row.gpuSecondsAToken,
  };
  const sorted = [...rows];
  if (values[choice.sort]) sorted.sort((one, other) => values[choice.sort](one) - values[choice.sort](other));
  const lines = sorted.map((row) => {
    const id = `row-${row.strategy}`;
    const radio = made("input", { type: "radio", name: "row", id, value: row.strategy });
    radio.checked = row === chosen;
    const name = made("th", { scope: "row" }, made("label", { for: id }, radio, ` ${strategyText(row, choice.gpus)}`));
    if (row === best) name.append(" ", made("span", { class: `tag ${row.status}` }, "recommended"));
    return made("tr", { class: `${row.status} ${row === chosen ? "chosen" : ""}`, "data-strategy": row.strategy },
      name,
      made("td", {}, verdictOf(row)),
      made("td", { class: "memory" }, ...memoryOf(row)),
      hostOf(row),
      cell("Micro batch", String(row.batch)),
      cell("Step", between(row.seconds, inSeconds)),
      cell("Tokens/s", aboutRate(row)),
      cell("1M tokens", priceText(choice, row)));
  });
  at("strategies").tBodies[0].replaceChildren(...lines);
}

// The best of each value of what is compared: {value, row}; the row is null where no plan is made.
function compared(choice) {
  const values = {
    gpus: figures.counts, gpu: Object.keys(figures.gpus), method: figures.methods,
    length: lengthsOf(choice.model), model: Object.keys(figures.models),
  };
  const lines = [];
  for (const value of values[choice.compare]) {
    const other = { ...choice, [choice.compare]: value, row: "" };
    if (!lengthsOf(other.model).includes(other.length)) continue;
    const { rows, best } = plansOf(other);
    lines.push({ value, other, row: best || roomiest(rows) || null });
  }
  return lines;
}

function showCompared(choice) {
  const lines = compared(choice);
  const sure = lines.filter((line) => line.row && line.row.status === "fits");
  const byCard = choice.compare === "gpu";  // whose prices are not the same
  const own = lines.find((line) => line.value === choice[choice.compare]);
  const evens = byCard && choice.price > 0 && own.row && own.row.status !== "no";
  const first = (one, other) => (byCard ? one.row.rate > other.row.rate : one.row.gpuSecondsAToken < other.row.gpuSecondsAToken);
  const winner = sure.length ? sure.reduce((best, line) => (first(line, best) ? line : best)) : null;
  const evenText = (row) => {
    const even = (choice.price * own.row.gpuSecondsAToken) / row.gpuSecondsAToken;
    return `${CURRENCIES[choice.currency]} ${grouped(even, 2)}`;
  };
  const texts = { gpus: (value) => `${value} x ${choice.gpu}`, length: grouped, model: modelText };
  const body = lines.map((line) => {
    const text = (texts[choice.compare] || String)(line.value);
    const name = made("th", { scope: "row" }, made("a", { href: addressOf(line.other), id: `to-${line.value}` }, text));
    if (line.value === choice[choice.compare]) name.append(" ", made("span", { class: "small" }, "your choice"));
    if (line === winner) name.append(" ", made("span", { class: "tag fits" }, byCard ? "fastest" : "cheapest"));
    if (!line.row) return made("tr", {}, name, made("td", { colspan: 5 }, termsOf(line.other).refused || "not planned"));
    const { row } = line;
    return made("tr", { "data-value": line.value, class: row.status },
      name,
      made("td", {}, strategyText(row, line.other.gpus) + (row.batch > 1 ? `, micro batch ${row.batch}` : "")),
      made("td", {}, verdictOf(row)),
      made("td", { class: "memory" }, ...memoryOf(row)),
      cell("Tokens/s", aboutRate(row)),
      evens ? cell("Breaks even at", evenText(row)) : cell("1M tokens", priceText(choice, row)));
  });
  at("price-head").textContent = evens ? "Breaks even at, a GPU-hour" : "Price of 1M tokens";
  const evenNote = ` Offered below the price in the last column, a card is cheaper a token than your ${choice.gpu} at ${CURRENCIES[choice.currency]} ${choice.price}.`;
  at("others-note").textContent = `The best strategy of each. A link changes your choice.${evens ? evenNote : ""}`;
  at("others").tBodies[0].replaceChildren(...body);
}

// What to run in a sentence; what would fit where nothing does.
function answerOf(choice, rows, best, chosen) {
  const machine = `${choice.model} on ${choice.gpus} x ${choice.gpu}`;
  if (!rows.length) return [`No plan for ${choice.model} with ${choice.method}.`, termsOf(choice).refused || ""];
  if (!chosen || (!best && chosen.status === "no")) return [`Nothing fits ${machine}.`, wayOut(choice)];
  const row = chosen;
  const way = row.batch > 1 ? ` with micro batches of ${row.batch}` : "";
  const lacksHost = row.host > row.usualHost;
  const fits = { fits: "fits", tight: lacksHost ? "may run out of host memory on" : "may run out of memory on", no: "does not fit" };
  const parts = [`${gigabytes(row.needed)} of ${gigabytes(row.capacity)} GB (nvidia-smi up to ${gigabytes(row.shown)})`];
  if (row.host) parts.push(`${gigabytes(row.host)} GB of host memory${lacksHost ? ` where ${gigabytes(row.usualHost)} are usual` : ""}`);
  parts.push(`likely ${between(row.likely, inSeconds).replace(" - ", " to ")} per step`, `about ${aboutRate(row)} tokens/s`);
  if (choice.price > 0) parts.push(`price of 1M tokens ${priceText(choice, row).replace(" - ", " to ")}`);
  return [`${strategyText(row, choice.gpus)}${way} ${fits[row.status]} ${machine}.`, `${parts.join(", ")}.`];
}

// The number of these GPUs on which a token costs least, where the job fits for sure; null where it does on none.
function cheapestNumber(choice) {
  let found = null;
  for (const gpus of figures.counts) {
    const { best } = plansOf({ ...choice, gpus });
    if (!best || best.status !== "fits") continue;
    if (!found || best.gpuSecondsAToken < found.best.gpuSecondsAToken) found = { gpus, best };
  }
  return found;
}

// In words, with a link to a number that is not the chosen one; what else to try where it fits on none for sure.
function numberText(choice, best) {
  const found = cheapestNumber(choice);
  if (!found) return best ? [`Nothing here fits for sure. ${wayOut(choice)}`] : [];
  const { gpus } = found;
  const range = `${figures.counts[0]} to ${figures.counts[figures.counts.length - 1]}`;
  if (gpus === choice.gpus) return [`Of ${range} of these GPUs, this number is the cheapest a token.`];
  const link = made("a", { href: addressOf({ ...choice, gpus, row: "" }) }, `${gpus} x ${choice.gpu}`);
  const price = choice.price > 0 ? `: ${priceText(choice, found.best).replace(" - ", " to ")} for 1M tokens` : "";
  return [`Of ${range} of these GPUs, what fits and costs least a token is `, link, ` with ${strategyText(found.best, gpus)}${price}.`];
}

function wayOut(choice) {
  const ways = [];
  for (const gpus of figures.counts.filter((number) => number > choice.gpus)) {
    const { best } = plansOf({ ...choice, gpus });
    if (!best || best.status !== "fits") continue;
    ways.push(`${strategyText(best, gpus)} on ${gpus} GPUs`);
    break;
  }
  for (const method of figures.methods.filter((name) => name !== choice.method)) {
    const { best } = plansOf({ ...choice, method });
    if (best && best.status === "fits") ways.push(`${method} (${strategyText(best, choice.gpus)})`);
  }
  return ways.length ? `What does: ${ways.join("; ")}.` : "Neither more GPUs nor another method of the atlas does. Try another card.";
}

// Lines end between words alone: "--" would be taken for a place to break.
function showCommand(id, command) {
  const words = command.split(" ").map((word) => made("span", {}, word));
  at(id).replaceChildren(...words.flatMap((word) => [word, " "]).slice(0, -1));
}

function show() {
  const focused = document.activeElement && document.activeElement.id;
  const { choice, notes } = choiceOf(location.hash);
  const { rows, best } = plansOf(choice);
  const chosen = rows.find((row) => row.strategy === choice.row) || best || roomiest(rows);
  showChoice(choice);
  showStrategies(choice, rows, best, chosen);
  showCompared(choice);
  const [verdict, takes] = answerOf(choice, rows, best, chosen);
  at("answer").className = chosen ? chosen.status : "no";
  const number = numberText(choice, best);
  at("answer").replaceChildren(made("p", {}, verdict), made("p", {}, takes), ...(number.length ? [made("p", {}, ...number)] : []));
  at("basis").textContent = chosen && chosen.status !== "no" ? `By formulas. ${howGood(choice, chosen)}` : "By formulas.";
  const { packed } = termsOf(choice);
  if (packed !== undefined) notes.push(`4 bits pack only ${(100 * packed).toFixed(0)} % of the weights of this model's layers. The others, such as experts, stay in 16 bits.`);
  at("note").textContent = notes.join(" ");
  showCommand("plan-command", planCommand(choice, chosen));
  showCommand("train-command", chosen ? trainCommand(choice, chosen) : "");
  const shipped = figures.models[choice.model].recipes[choice.method];
  at("recipe").textContent = `RECIPE.yaml is your recipe${shipped ? `; a shipped one for this model is ${shipped}` : ""}.`;
  at("copied").textContent = "";
  document.title = `${choice.model}, ${choice.method}, ${choice.gpus} x ${choice.gpu}: atlas of zero-recipes`;
  if (focused && at(focused)) at(focused).focus();
}

function change(key, value) {
  const { choice } = choiceOf(location.hash);
  if (!["sort", "compare", "price", "currency"].includes(key)) choice.row = "";
  location.hash = addressOf({ ...choice, [key]: value });  // "hashchange" shows it, as back and forward do
}

async function copy(text) {
  at("copied").textContent = text;
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // where the browser has no clipboard for files
    getSelection().selectAllChildren(at("copied"));
    document.execCommand("copy");
  }
  at("copied").textContent = `Copied: ${text}`;
}

for (const id of ["model", "method", "gpu", "gpus", "length", "batch", "price", "currency", "sort", "compare"]) {
  at(id).addEventListener("change", (event) => change(id, event.target.value));
}
at("choice").addEventListener("submit", (event) => event.preventDefault());
at("strategies").addEventListener("change", (event) => change("row", event.target.value));
for (const button of document.querySelectorAll("[data-copies]")) {
  button.addEventListener("click", () => copy(at(button.dataset.copies).textContent));
}
at("link").addEventListener("click", () => copy(location.href.replace(/#.*/, "") + addressOf(choiceOf(location.hash).choice)));
addEventListener("hashchange", show);
const libraries = Object.entries(figures.versions).map(([name, version]) => `${name} ${version}`).join(", ");
at("made").textContent = `All by the planner's ${figures.source}, which stand in for the simulated engine; made on ${figures.date} `
  + `with ${libraries}. ${figures.without_bf16.join(", ")} have no bf16 and are left out: plan them with --bf16 false --fp16 true.`;
show();
