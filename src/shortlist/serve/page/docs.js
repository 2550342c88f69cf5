// The page of the API, drawn from its OpenAPI description.

const api = await (await fetch("/openapi.json")).json();

function element(tag, content = [], properties = {}) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...[content].flat());
  return made;
}

const resolve = (schema) => (schema?.$ref ? api.components.schemas[schema.$ref.split("/").pop()] : schema);

// In words: "integer, 1 to 200, default 10".
function kind(schema) {
  const plain = schema.anyOf ? { ...schema, ...schema.anyOf.find(({ type }) => type !== "null") } : schema;
  const named = schema.$ref?.split("/").pop() ?? plain.$ref?.split("/").pop();
  const words = [plain.format === "binary" ? "file" : named ?? plain.type];
  if (plain.type === "array") words[0] = `list of ${kind(plain.items)}`;
  if (plain.minimum !== undefined) words.push(plain.maximum < 2 ** 50 ? `${plain.minimum} to ${plain.maximum}` : `${plain.minimum} or more`);
  if (plain.default !== undefined) words.push(`default ${plain.default}`);
  if (schema.anyOf?.some(({ type }) => type === "null")) words.push("or null");
  return words.join(", ");
}

function list(rows) {
  return element("dl", rows.flatMap(([name, type, about]) => [
    element("dt", name),
    element("dd", [element("span", type, { className: "kind" }), about ? ` · ${about}` : ""]),
  ]));
}

const fields = (schema) => Object.entries(resolve(schema).properties ?? {}).map(
  ([name, each]) => [name, kind(each), each.description ?? resolve(each)?.description]);

// All fields of an answer, and of what is in it.
function answer(schema, path = "") {
  return Object.entries(resolve(schema)?.properties ?? {}).flatMap(([name, each]) => {
    const inner = each.items ?? each.anyOf?.find(({ $ref }) => $ref) ?? each;
    const here = `${path}${name}${each.items ? "[]" : ""}`;
    return [[here, kind(each), each.description], ...(inner.$ref ? answer(inner, `${here}.`) : [])];
  });
}

function example(method, path, form) {
  const url = `${location.origin}${path.replace("{id}", "0")}`;
  if (form) return `curl -F image=@photo.jpg -F k=5 ${url}`;
  return path.endsWith("image") || path.endsWith("thumbnail") ? `curl -o picture.jpg ${url}` : `curl ${url}`;
}

function endpoint(path, method, operation) {
  const form = operation.requestBody?.content["multipart/form-data"]?.schema;
  const given = (operation.parameters ?? []).map(({ name, schema, description }) => [name, kind(schema), description]);
  const good = operation.responses["200"].content;
  const parts = [
    element("h2", [element("span", method.toUpperCase(), { className: "method" }), path]),
    element("p", operation.description ?? operation.summary),
    element("pre", example(method, path, form)),
  ];
  if (given.length) parts.push(element("h3", "Parameters"), list(given));
  if (form) parts.push(element("h3", "Fields of the form"), list(fields(form)));
  const rows = good["application/json"] ? answer(good["application/json"].schema) : [["image/jpeg", "a picture", ""]];
  parts.push(element("h3", "Answer"), list(rows));
  const refused = Object.entries(operation.responses).filter(([status]) => status !== "200");
  parts.push(element("h3", "Otherwise"), list(refused.map(([status, { description }]) => [status, description, ""])));
  return element("section", parts, { className: "endpoint", id: `${method}${path}` });
}

const shown = decodeURIComponent(location.hash.slice(1));
document.getElementById("about").textContent = api.info.description;
for (const [path, operations] of Object.entries(api.paths)) {
  for (const [method, operation] of Object.entries(operations)) {
    const made = endpoint(path, method, operation);
    document.getElementById("endpoints").append(made);
    document.getElementById("contents").append(element("a", [
      element("span", method.toUpperCase(), { className: "method" }), element("code", path)], { href: `#${made.id}` }));
  }
}
document.getElementById(shown)?.scrollIntoView(); // it was not there when the browser looked for it
