"""Print docs/configuration.md: every field of a run's configuration, from its JSON schema.

python tools/config_reference.py > docs/configuration.md
"""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_p3o.config import json_schema

_INTRODUCTION = """\
# Configuration

Rendered by `python tools/config_reference.py > docs/configuration.md`; a test keeps it current.

A run is one YAML file of sections. Any field can be set on the command line, where the value is
read as YAML:

```
p3o train RUN.yaml --optimizer.lr 1e-5 --optimizer.betas "[0.9, 0.95]" --run.dir runs/other
```

Unknown fields, wrong types and values that contradict each other are refused with a message that
names the field. `p3o check RUN.yaml` checks a file and the files it names, and starts nothing.
`p3o schema` prints the JSON schema that this page is made from. The resolved configuration is
written to `config.yaml` in the run dir.
"""

_HEADER = "| Field | Type | Default | Meaning |\n|---|---|---|---|\n"
_BOUNDS = (
    ("exclusiveMinimum", ">"),
    ("minimum", ">="),
    ("exclusiveMaximum", "<"),
    ("maximum", "<="),
)

_Schema = Mapping[str, Any]


def render(schema: _Schema) -> str:
    """The whole page, from `RunConfig.model_json_schema()`."""
    definitions = schema["$defs"]
    parts = [_INTRODUCTION]
    for section, node in schema["properties"].items():
        parts.append(f"## {section}\n")
        for model in _models(node, definitions):
            if "oneOf" in node:
                parts.append(f"### {section}.name: {model['properties']['name']['const']}\n")
            if "description" in model:
                parts.append(_one_line(model["description"]) + "\n")
            parts.append(_HEADER + "".join(_rows(section, model, definitions)))
    return "\n".join(parts)


def _models(node: _Schema, definitions: _Schema) -> list[_Schema]:
    """The section's model, or each model of a union."""
    return [_resolve(choice, definitions) for choice in node.get("oneOf", [node])]


def _resolve(node: _Schema, definitions: _Schema) -> _Schema:
    return definitions[node["$ref"].rpartition("/")[2]] if "$ref" in node else node


def _rows(prefix: str, model: _Schema, definitions: _Schema) -> Iterator[str]:
    for name, node in model.get("properties", {}).items():
        path = f"{prefix}.{name}"
        resolved = _resolve(node, definitions)
        if "properties" in resolved:
            yield from _rows(path, resolved, definitions)
            continue
        required = name in model.get("required", ())
        # Only a mapping has a default that the schema leaves out.
        default = "required" if required else f"`{json.dumps(node.get('default', {}))}`"
        meaning = _one_line(node.get("description", ""))
        yield f"| `{path}` | {_type(node)} | {default} | {meaning} |\n"
        for choice in node.get("anyOf", ()):  # a section that may be left out
            yield from _rows(path, _resolve(choice, definitions), definitions)


def _type(node: _Schema) -> str:
    if "$ref" in node:
        return "section"
    if "const" in node:
        return f"`{node['const']}`"
    if "enum" in node:
        return ", ".join(f"`{value}`" for value in node["enum"])
    if "anyOf" in node:
        return " or ".join(_type(choice) for choice in node["anyOf"])
    if "prefixItems" in node:
        return f"[{', '.join(_type(item) for item in node['prefixItems'])}]"
    name = "mapping" if node["type"] == "object" else node["type"]
    bounds = [f"{sign} {node[key]}" for key, sign in _BOUNDS if key in node]
    return " ".join([name, ", ".join(bounds)]).strip()


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def main() -> None:
    print(render(json.loads(json_schema())), end="")


if __name__ == "__main__":
    main()
