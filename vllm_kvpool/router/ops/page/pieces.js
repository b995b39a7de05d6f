// Pieces of the page: elements, and numbers for people. They know nothing of the router.

export const byId = (id) => document.getElementById(id);

// Small pieces of document

export function make(tag, className = "", text = "") {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text) element.textContent = text;
  return element;
}

export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** As many children of a kind as there are values, each told its own. */
export function fill(parent, values, create, tell) {
  while (parent.children.length > values.length) parent.lastElementChild.remove();
  while (parent.children.length < values.length) parent.append(create());
  values.forEach((value, index) => tell(parent.children[index], value));
}

// Numbers for people

const whole = new Intl.NumberFormat("en");
export const count = (value) => whole.format(Math.round(value));

export function short(value) {
  if (value < 10) return value && value < 9.95 ? value.toFixed(value < 0.1 ? 2 : 1).replace(/\.0+$/, "") : count(value);
  for (const [size, unit] of [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (value >= size) return (value / (unit === "k" ? 1e3 : size)).toPrecision(3).replace(/\.?0+$/, "") + unit;
  }
  return count(value);
}

export function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${unit && value < 100 ? value.toFixed(1) : Math.round(value)} ${units[unit]}`;
}

export function seconds(value) {
  if (value < 1) return `${Math.round(value * 1000)} ms`;
  if (value < 10) return `${value.toFixed(2)} s`;
  if (value < 120) return `${Math.round(value)} s`;
  if (value < 7200) return `${Math.round(value / 60)} min`;
  return value < 172800 ? `${Math.round(value / 3600)} h` : `${Math.round(value / 86400)} d`;
}
