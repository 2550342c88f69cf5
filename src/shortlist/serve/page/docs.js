// The page of the JSON API, generated from its OpenAPI description.

const api = await (await fetch("/openapi.json")).json();

function element(tag, content = [], properties = {}) {
  const created = Object.assign(document.createElement(tag), properties);
  created.append(...[content].flat());
  return created;
}

const resolve = (schema) => (schema?.$ref ? api.components.schemas[schema.$ref.split("/").pop()] : schema);

// Describe a type, for example "integer, 1 to 200, default 10".
function describeType(schema) {
  const plain = schema.anyOf ? { ...schema, ...schema.anyOf.find(({ type }) => type !== "null") } : schema;
  const named = schema.$ref?.split("/").pop() ?? plain.$ref?.split("/").pop();
  const words = [plain.format === "binary" ? "file" : named ?? plain.type];
  if (plain.type === "array") words[0] = `list of ${describeType(plain.items)}`;
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
  ([name, each]) => [name, describeType(each), each.description ?? resolve(each)?.description]);

// List all fields of a response, including nested ones.
function responseFields(schema, path = "") {
  return Object.entries(resolve(schema)?.properties ?? {}).flatMap(([name, each]) => {
    const inner = each.items ?? each.anyOf?.find(({ $ref }) => $ref) ?? each;
    const here = `${path}${name}${each.items ? "[]" : ""}`;
    return [[here, describeType(each), each.description], ...(inner.$ref ? responseFields(inner, `${here}.`) : [])];
  });
}

function example(path, { requestBody, security }) {
  const curl = security ? 'curl -H "Authorization: Bearer $SHORTLIST_TOKEN"' : "curl";
  const url = `${location.origin}${path.replace("{id}", "0")}`;
  if (requestBody) return `${curl} -F image=@photo.jpg -F k=5 ${url}`;
  return path.endsWith("image") || path.endsWith("thumbnail") ? `${curl} -o picture.jpg ${url}` : `${curl} ${url}`;
}

function endpoint(path, method, operation) {
  const form = operation.requestBody?.content["multipart/form-data"]?.schema;
  const parameters = (operation.parameters ?? []).map(({ name, schema, description }) => [name, describeType(schema), description]);
  const success = operation.responses["200"].content;
  const parts = [
    element("h2", [element("span", method.toUpperCase(), { className: "method" }), path]),
    element("p", operation.description ?? operation.summary),
    element("pre", example(path, operation)),
  ];
  if (parameters.length) parts.push(element("h3", "Parameters"), list(parameters));
  if (form) parts.push(element("h3", "Form fields"), list(fields(form)));
  const rows = success["application/json"] ? responseFields(success["application/json"].schema) : [["image/jpeg", "file", ""]];
  parts.push(element("h3", "Response"), list(rows));
  const errors = Object.entries(operation.responses).filter(([status]) => status !== "200");
  parts.push(element("h3", "Errors"), list(errors.map(([status, { description }]) => [status, description, ""])));
  return element("section", parts, { className: "endpoint", id: `${method}${path}` });
}

const anchor = decodeURIComponent(location.hash.slice(1));
document.getElementById("about").textContent = api.info.description;
for (const [path, operations] of Object.entries(api.paths)) {
  for (const [method, operation] of Object.entries(operations)) {
    const section = endpoint(path, method, operation);
    document.getElementById("endpoints").append(section);
    document.getElementById("contents").append(element("a", [
      element("span", method.toUpperCase(), { className: "method" }), element("code", path)], { href: `#${section.id}` }));
  }
}
document.getElementById(anchor)?.scrollIntoView(); // the browser looked for it before it was created
