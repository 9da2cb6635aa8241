// Describes JSON schemas in words.

const LARGEST = 1e300; // a bound beyond it means "any finite number"

/** The fields of a body: name, allowed values and description. Required fields come first. */
export function fieldRows(schema) {
  const required = new Set(schema.required ?? []);
  const names = Object.keys(schema.properties);
  const ordered = [...names.filter((name) => required.has(name)), ...names.filter((name) => !required.has(name))];
  return ordered.map((name) => {
    const field = schema.properties[name];
    const value = field.default;
    const isEmpty = value === null || value === undefined || (typeof value === "object" && !Object.keys(value).length);
    const more = required.has(name) ? " Required." : isEmpty ? "" : ` Default: \`${JSON.stringify(value)}\`.`;
    const about = (field.description ?? "").replace(/\.?$/, ".");
    return { name, type: words(field), about: about + more };
  });
}

/** The allowed values of a schema. null is left out: it counts as an absent field. */
export function words(schema) {
  if (schema.anyOf) return [...new Set(schema.anyOf.map(words).filter(Boolean))].join(" or ");
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) {
    const values = schema.enum.filter((value) => value !== null);
    return values.length ? values.map((value) => JSON.stringify(value)).join(", ") : "null";
  }
  const types = [schema.type ?? []].flat().filter((type) => type !== "null");
  return types.map((type) => ofType(type, schema)).join(" or ");
}

function ofType(type, schema) {
  if (type === "array") {
    const items = schema.items ? words(schema.items) : "";
    return items ? `list of ${items.includes(" or ") ? `(${items})` : items}` : "list";
  }
  if (type !== "number" && type !== "integer") return type;
  const bounds = [
    [">=", schema.minimum], [">", schema.exclusiveMinimum], ["<=", schema.maximum],
  ].filter(([, bound]) => bound !== undefined && Math.abs(bound) < LARGEST);
  return [type, bounds.map(([sign, bound]) => `${sign} ${bound}`).join(" and ")].filter(Boolean).join(" ");
}
