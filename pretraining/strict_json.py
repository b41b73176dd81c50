"""JSON that users write: parsed strictly, checked against schemas, every error a sentence with its place."""

import difflib
import json
import json.scanner
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError

from data_prep.errors import UserError

LARGEST = 1e30  # of a number that is multiplied in float32


class StrictModel(BaseModel):
    """An object of a JSON file: no unknown keys, no strings for numbers, no NaN, not changed afterwards."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class Errors(list[str]):
    """The errors found in one file so far, a sentence each.

    `refused` says of each section by name ("" is the top) which keys are refused and why.
    """

    def __init__(self, path: str, refused: Mapping[str, Mapping[str, str]]):
        super().__init__()
        self.path = path
        self.refused = refused

    def add(self, sentence: str) -> None:
        self.append(f"{self.path}: {sentence}")

    def raise_any(self) -> None:
        if self:
            raise UserError("\n  ".join(self))


def parse(text: str, errors: Errors) -> dict[str, Any]:
    """Strict JSON: duplicate keys, trailing commas and NaN are errors with their line and column."""

    def place(offset: int) -> str:
        line_start = text.rfind("\n", 0, offset) + 1
        return f"line {text.count(chr(10), 0, offset) + 1}, column {offset - line_start + 1}"

    def parse_object(text_and_start: tuple[str, int], *arguments: Any) -> tuple[dict[str, Any], int]:
        strict, scan_once, _, _, memo = arguments
        pairs, end = json.decoder.JSONObject(text_and_start, strict, scan_once, None, list, memo)
        keys = [key for key, _ in pairs]
        for key in sorted({key for key in keys if keys.count(key) > 1}):
            at = place(text_and_start[1] - 1)
            errors.add(f'"{key}" stands twice in the object that begins at {at}; keep one of them')
        return dict(pairs), end

    def refuse_constant(name: str) -> float:
        errors.add(f"{name} is not a JSON number; write a finite one")
        return 0.0

    if not text.strip():
        errors.add("the file is empty")
        return {}
    decoder = json.JSONDecoder(parse_constant=refuse_constant)
    decoder.parse_object = parse_object
    decoder.scan_once = json.scanner.py_make_scanner(decoder)  # the C scanner ignores parse_object
    try:
        document = decoder.decode(text)
    except json.JSONDecodeError as error:
        before = text[: error.pos].rstrip()
        if before.endswith(",") and text[error.pos : error.pos + 1] in ("}", "]"):
            errors.add(f"a comma without a successor at {place(len(before) - 1)}; delete it")
        else:
            errors.add(f"not valid JSON at {place(error.pos)}: {error.msg}")
        return {}
    except RecursionError:
        errors.add("it is nested too deeply for a configuration")
        return {}
    if not isinstance(document, dict):
        errors.add('expected an object like {"train_batch_size": 256, …} at the top level')
        return {}
    return document


def refuse_auto(value: Any, errors: Errors, name: str = "") -> None:
    """Refuse the string "auto" at any depth: DeepSpeed drops such keys and takes its defaults."""
    if value == "auto":
        errors.add(
            f'"{name}" is "auto", which only Hugging Face\'s Trainer fills in; write a value or leave it out'
        )
    for key, inner in value.items() if isinstance(value, dict) else ():
        refuse_auto(inner, errors, f"{name}.{key}" if name else key)


def check(schema: type[BaseModel], section: Any, name: str, errors: Errors) -> Any:
    """The section as an object of the schema, or None after adding its errors; refused keys are left out."""
    refused = errors.refused.get(name, {})
    if not isinstance(section, dict):
        return None  # its own section has complained
    prefix = f"{name}." if name else ""
    for key in section.keys() & refused.keys():
        if not _is_off(section[key]):
            errors.add(f'"{prefix}{key}" is not supported: {refused[key]}')
    given = {key: value for key, value in section.items() if key not in refused and value != "auto"}
    try:
        model = schema(**given)
    except ValidationError as error:
        for fault in error.errors():
            if not (fault["type"] == "missing" and section.get(fault["loc"][0]) == "auto"):
                errors.add(_sentence(fault, prefix, schema, refused))
        return None
    for key, value in given.items():
        if _is_coerced(value, getattr(model, key, value)):
            read = json.dumps(getattr(model, key), default=str)
            errors.add(
                f'"{prefix}{key}" is {json.dumps(value)}, which DeepSpeed would read as {read}; write that'
            )
    return model


def _is_coerced(written: Any, read: Any) -> bool:
    """DeepSpeed's own schemas take "2" for 2 and "no" for a truth value, and what is checked here is what is written."""
    texts = isinstance(written, str) and not isinstance(read, str)
    return texts or isinstance(written, bool) != isinstance(read, bool) and not isinstance(written, dict)


def _is_off(value: Any) -> bool:
    return value in (False, None) or (isinstance(value, dict) and value.get("enabled") is False)


def _sentence(
    fault: Mapping[str, Any], prefix: str, schema: type[BaseModel], refused: Mapping[str, str]
) -> str:
    *parents, key = fault["loc"] or ("",)
    name = (prefix + ".".join(map(str, fault["loc"]))).rstrip(".")
    if fault["type"] == "missing":
        return f'"{name}" is missing; write it'
    if fault["type"] != "extra_forbidden":
        expected = fault["msg"].replace("Input", "it", 1).replace("should be None", "belongs to another type")
        return f'"{name}" is {json.dumps(fault["input"], default=str)}; {expected}'
    for parent in parents:
        annotation = schema.model_fields[parent].annotation
        schema = next(kind for kind in (annotation, *get_args(annotation)) if hasattr(kind, "model_fields"))
    aliases = [field.alias for field in schema.model_fields.values() if field.alias]
    near = difflib.get_close_matches(key, [*schema.model_fields, *aliases, *refused], n=1, cutoff=0.5)
    hint = f'did you mean "{near[0]}"?' if near else "DeepSpeed has no such key; leave it out"
    return f'"{name}" is unknown; {hint}'
