"""Conversations to text, and which of it counts: chat templates, as `transformers` runs them.

A chat template is a Jinja program that comes with a model. It runs in a sandbox: it sees the
conversation and nothing else, not even the date, so that a text always gives the same tokens.
What the assistant says counts in the loss. A template marks it by ``{% generation %}`` blocks;
without those it is what each assistant's turn adds to the rendered text. The end-of-document token
after a conversation counts as well where the assistant has the last word.
"""

import dataclasses
import functools
import json
import re
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxtrain.data.tokenizers import Tokenizer
from jaxtrain.host import extras
from jaxtrain.host.paths import as_path, exists, is_file, is_folder, read_json

Span = tuple[int, int]
Messages = list[dict[str, Any]]

# "plain" is a prompt and its completion, one after the other.
TEMPLATES = {
    "chatml": (
        "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
        "{% if message.role == 'assistant' %}"
        "{% generation %}{{ (message.content or '') + '<|im_end|>' }}{% endgeneration %}"
        "{% else %}{{ (message.content or '') + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    ),
    "plain": (
        "{% for message in messages %}{% if message.role == 'assistant' %}"
        "{% generation %}{{ message.content or '' }}{% endgeneration %}"
        "{% else %}{{ message.content or '' }}{% endif %}{% endfor %}"
    ),
}
# What transformers calls the files of a template and of its tokens.
TEMPLATE, TOKENIZER_CONFIG = "chat_template.jinja", "tokenizer_config.json"
# Which fields a record has, by the name of each form that it may be read by.
FORMS = {
    "messages": {"messages"},
    "label": {"prompt", "completion", "label"},
    "completion": {"prompt", "completion"},
    "chosen": {"chosen", "rejected"},
}
_ASKING = ("user", "system", "developer")
# Fields of messages, and fields of objects for the template; both may be JSON as text.
_TALK, _OBJECTS = ("messages", "prompt", "completion", "chosen", "rejected"), ("tools", "documents")
FIELDS = (*_TALK, "label", *_OBJECTS)
# A message has one of these beside its role.
_SAID = {"content", "tool_calls"}
# Text that begins as an object, or as messages.
_OBJECT_TEXT = re.compile(r"\s*\[?\s*\{")
_MESSAGES_TEXT = re.compile(r"\s*\[\s*\{\s*[\"'](role|content)[\"']\s*:")
# Unicode's noncharacters, which no text has: where a span that counts begins and ends, and what
# stands inside of a text that spells a special token.
_BEGIN, _END, _INSIDE = "\ufdd0", "\ufdd1", "\ufdd2"
_MARKS = re.compile(f"[{_BEGIN}{_END}{_INSIDE}]")
# Processor time that one rendering may take: a machine that is busy fails no conversation.
SECONDS = 10.0
_clock = threading.local()  # `end` of the rendering in each thread
# A number of bits or of items, beyond which one operation of a template may take long.
_HUGE = 1 << 22
_HUGE_WIDTH = re.compile(r"%(\(.*?\))?[^%a-zA-Z]*(\d{8}|\*)")


class _JsonText(str):
    """The arguments of a call as JSON text, as OpenAI has them. A template may print the text, and
    its filter `tojson` gives the same JSON rather than that of a text."""


class Conversation(NamedTuple):
    """A document that a chat template has made of a record.

    Attributes:
      name: within the source.
      text: UTF-8.
      counted: the bytes that count in the loss, as ascending pairs of start and end.
      special: the bytes that are special tokens of the template.
      side: of a preference, "chosen" or "rejected", which follow each other; "" for none.
    """

    name: str
    text: bytes
    counted: tuple[Span, ...]
    special: tuple[Span, ...]
    side: str = ""


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """A chat template, with what it needs of a tokenizer.

    What a message says is never a special token, however it is spelled: no text ends its turn.

    Args:
      text: the Jinja program. It has the variables `messages`, `tools`, `documents`,
        `add_generation_prompt` and those of `tokens`.
      tokens: such as ``{"bos_token": "<s>"}``.
      special: the tokenizer's `special_pattern`.

    >>> chat = ChatTemplate(TEMPLATES["plain"])
    >>> chat.conversations("a", {"prompt": "1 + 1 = ", "completion": "2"})
    [Conversation(name='a', text=b'1 + 1 = 2', counted=((8, 9),), special=(), side='')]
    """

    text: str
    tokens: Mapping[str, str] = dataclasses.field(default_factory=dict)
    special: str = ""

    def render(
        self, messages: Messages, *, add_generation_prompt: bool = False, **more: Any
    ) -> str:
        """Returns the text of a conversation, as ``apply_chat_template(tokenize=False)`` does."""
        return _MARKS.sub("", self._marked(messages, add_generation_prompt, more))

    def prompt(self, messages: Messages) -> Conversation:
        """Returns a conversation up to where the assistant is to speak; what its messages say is
        text, as training has it. Raises ValueError where the template fails."""
        _check_texts(messages)
        marked = self._marked(self._harmless(messages), True, {})
        return Conversation("the messages", *_read(marked, self.special))

    def conversations(
        self,
        name: str,
        record: Mapping[str, Any],
        where: str = "the record",
        *,
        field: str | None = None,
    ) -> list[Conversation]:
        """Returns the conversation of a record; of a preference, the chosen and the rejected one;
        of one with a label, one of these and nothing in the place of the other.

        Of a preference, what the assistant says before the two differ does not count: such turns
        are part of the prompt.

        Args:
          record: `messages`, or `prompt` and `completion`, perhaps with a `label` (whether the
            answer is a good one), or `chosen` and `rejected` with or without a `prompt`. Each is a
            list of messages, or JSON text of one, or another string: what the user says in
            `prompt`, else the assistant. `tools` and `documents`, lists of objects or JSON text of
            one, go to a template that names them.
          where: names the record in errors.
          field: of a record that has several of `messages`, `completion` and `chosen`, which;
            `completion` reads no label.

        Raises:
          ValueError: it is something else, the template fails, nothing of it counts (as where one
            side is the beginning of the other), or the template has no spans and a turn changes
            what was rendered before it.
        """
        rendered = []
        # Another template does not read them, whatever a data set calls by these names.
        names = [name for name in _OBJECTS if name in self.text]
        objects = {name: _objects(record.get(name), name, where) for name in names}
        for messages in _messages_of(record, where, field):
            try:
                variables = self._harmless(objects)
                messages = self._harmless(messages)
                if self.text in TEMPLATES.values():
                    _check_texts(messages)
                marked = self._marked(messages, False, variables)
                _, has_spans = _compiled(self.text)
                if not has_spans:
                    marked = self._by_prefixes(messages, marked, variables)
                found = Conversation(name, *_read(marked, self.special))
            except ValueError as error:
                raise ValueError(f"{where} cannot be rendered: {error}") from None
            if not found.counted:
                raise ValueError(f"{where} has nothing of an assistant to learn from: drop it")
            rendered.append(found)
        if len(rendered) == 2:
            return _without_prompt(*rendered, where)
        has = {name for name in FIELDS if record.get(name) is not None}
        return _labelled(rendered[0], record, where) if _form(has, field) == "label" else rendered

    def _marked(self, messages: Messages, prompt: bool, more: Mapping[str, Any]) -> str:
        program, _ = _compiled(self.text)
        variables = {"tools": None, "documents": None} | more | dict(self.tokens)
        _clock.end = time.thread_time() + SECONDS
        try:
            return program.render(messages=messages, add_generation_prompt=prompt, **variables)
        # A template can fail in any way that Python can.
        except Exception as error:
            raise ValueError(f"the chat template fails ({error})") from None

    def _by_prefixes(self, messages: Messages, whole: str, more: Mapping[str, Any]) -> str:
        """Marks in the rendered whole what each turn of the assistant adds to what is before it."""
        parts, done = [], 0
        for turn, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            before = self._marked(messages[:turn], True, more)
            after = self._marked(messages[: turn + 1], False, more)
            follows = after.startswith(before) and whole.startswith(after)
            if not follows or len(before) < done:
                raise ValueError(
                    f"turn {turn + 1} changes what the chat template renders before it, so what "
                    "the assistant says cannot be found: mark that by {% generation %} and "
                    "{% endgeneration %} in the template"
                )
            parts += [whole[done : len(before)], _BEGIN, after[len(before) :], _END]
            done = len(after)
        return "".join([*parts, whole[done:]])

    def _harmless(self, value: Any) -> Any:
        """Returns messages in which no text makes a special token."""
        if isinstance(value, dict):
            value = {self._harmless(name): self._harmless(item) for name, item in value.items()}
            if isinstance(value.get("arguments"), str):
                value["arguments"] = _JsonText(value["arguments"])
            return value
        if isinstance(value, (list, tuple)):  # a tuple is an entry of a table's map
            return type(value)(map(self._harmless, value))
        if isinstance(value, str):
            if _MARKS.search(value):
                raise ValueError("it has one of the noncharacters U+FDD0 to U+FDD2: remove it")
            if self.special:
                value = re.sub(self.special, _spelled, value)
                value += _INSIDE * _may_go_on(value, self.special)
        return value


def forms_of(fields: Iterable[str]) -> list[str]:
    """Returns the forms of conversation that a record with these fields may be read by.

    >>> forms_of(["prompt", "chosen", "rejected", "messages"])
    ['messages', 'chosen']
    """
    return [form for form, each in FORMS.items() if each <= set(fields)]


def load_template(name: str) -> ChatTemplate:
    """Reads a chat template.

    Args:
      name: one of `TEMPLATES`, a Jinja file, a ``tokenizer_config.json``, or a folder of these (of
        a model or a run), local or in a bucket. A config says the tokens of the template beside it
        (``chat_template.jinja``), or of its own.

    Raises:
      FileNotFoundError: there is no such file, or the model has no template.
      ImportError: jinja2 is not installed.
      ValueError: it is no template.
    """
    text, tokens = TEMPLATES.get(name), {}
    if text is None:
        path = as_path(name)
        folder = path if is_folder(path) else path.parent
        config = folder / TOKENIZER_CONFIG
        if path in (folder, config):
            path = folder / TEMPLATE
            path = path if exists(path) else config
        config = path if path.suffix == ".json" else config
        values = read_json(config) if exists(config) else {}
        is_model = is_folder(as_path(name))
        if not is_file(path) or (is_model and path == config and "chat_template" not in values):
            wrong = f"chat template '{name}' does not exist"
            if is_model:
                wrong = f"'{name}' has no chat template for conversations"
            known = " or ".join(TEMPLATES)
            raise FileNotFoundError(f"{wrong}; give a file or a model's folder, or {known}")
        for each, token in values.items():
            token = token.get("content") if isinstance(token, dict) else token
            if each.endswith("_token") and isinstance(token, str):
                tokens[each] = token
        try:
            text = (
                path.read_text(encoding="utf-8") if path != config else values.get("chat_template")
            )
        except UnicodeDecodeError:
            raise ValueError(f"'{name}' is no text in UTF-8: give a Jinja file") from None
        if isinstance(text, list):  # several, by name
            named = [each for each in text if isinstance(each, dict)]
            text = {each.get("name"): each.get("template") for each in named}.get("default")
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"'{name}' has no template: give a Jinja file")
    _compiled(text)
    return ChatTemplate(text, tokens)


def encode_marked(
    documents: Sequence[Any], tokenizer: Tokenizer
) -> Iterator[tuple[np.ndarray, np.ndarray | None]]:
    """Yields the ids of each document, a text or a conversation, and which of them count; None
    where all do.

    A token that lies partly in a span that counts does count, as in `transformers`.
    """
    cut = [list(_cut(document)) for document in documents]
    begun = iter(tokenizer.encode_batch([parts[0] for parts in cut]))
    rest = [part for parts in cut for part in parts[2::2]]
    inside = iter(tokenizer.encode_inside(rest) if rest else ())
    for document, parts in zip(documents, cut, strict=True):
        if not isinstance(document, Conversation):
            yield next(begun), None
            continue
        ids, lengths = [], []
        for number, part in enumerate(parts):
            special = number % 2
            if special:
                own = np.array([tokenizer.special_id(part)], np.int32)
            else:
                own = next(inside if number else begun)
            pieces = [part] if special else tokenizer.token_pieces(own)
            added = b"".join(pieces) == b" " + part  # by the tokenizer, which begins texts with it
            if not added and b"".join(pieces) != part:
                raise ValueError(
                    f"{document.name}: this tokenizer loses text, so what counts of a conversation "
                    "cannot be found in its tokens: use one that keeps text as it is"
                )
            ids.append(own)
            lengths.append(np.array([len(piece) for piece in pieces], np.int64))
            lengths[-1][:1] -= added
        ends = np.cumsum(np.concatenate(lengths))
        starts = np.append(0, ends[:-1])
        counts = np.zeros(len(ends), np.uint8)
        for start, stop in document.counted:
            counts[np.searchsorted(ends, start, "right") : np.searchsorted(starts, stop)] = 1
        yield np.concatenate(ids), counts


def encode_prompt(text: str, tokenizer: Tokenizer) -> np.ndarray:
    """Returns the ids of a text whose special tokens are that, int32 [T]: one that is typed, or
    rendered by a template, and no part of which comes from a stranger.

    >>> from jaxtrain.data import ByteTokenizer
    >>> encode_prompt("ab", ByteTokenizer()).tolist()
    [97, 98]
    """
    pattern = tokenizer.special_pattern
    first, *rest = re.split(f"({pattern})", text) if pattern else [text]
    ids = [tokenizer.encode(first)]
    for token, part in zip(rest[::2], tokenizer.encode_inside(rest[1::2]), strict=True):
        ids += [np.array([tokenizer.special_id(token.encode())], np.int32), part]
    return np.concatenate(ids)


def _cut(document: Any) -> Iterator[bytes]:
    """Yields text, special token, text, and so on."""
    done = 0
    for start, stop in document.special if isinstance(document, Conversation) else ():
        yield document.text[done:start]
        yield document.text[start:stop]
        done = stop
    yield document.text[done:]


def _from_json(value: Any) -> Any:
    """Returns the value of a JSON text; None for another text, and anything else as it is."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        return None


def _objects(value: Any, name: str, where: str) -> Any:
    """Returns a list of objects that may be JSON text, as a whole or object by object."""
    objects = _from_json(value)
    if isinstance(objects, list):
        objects = [*map(_from_json, objects)]
    empty = not value or value == "null"
    if not empty and not (isinstance(objects, list) and all(type(x) is dict for x in objects)):
        raise ValueError(
            f"{where} has '{name}' that are neither a list of objects nor JSON text of one: write "
            "them as JSON"
        )
    return objects


def _are_messages(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) for message in value
    )


def _decoded(value: Any, name: str, where: str) -> Any:
    """Returns the messages of a field that may hold them as JSON text; another text as it is."""
    if isinstance(value, str):
        messages = _from_json(value)
        # Other objects that have a role, such as {"role": "CEO"}, are an answer.
        if messages and _are_messages(messages) and all(_SAID & x.keys() for x in messages):
            value = messages
        # Nobody means to train on the letters of messages that are cut off, or printed by Python.
        elif (messages is None and _MESSAGES_TEXT.match(value)) or (
            name == "messages" and _OBJECT_TEXT.match(value)
        ):
            raise ValueError(
                f"{where} has a field '{name}' that begins as messages and is no JSON of such: "
                "write a list of messages, each with a role"
            )
    elif isinstance(value, list):
        value = [*map(_from_json, value)]
    if not _are_messages(value):
        return value
    calls = "tool_calls"
    return [
        message | ({calls: _objects(message[calls], calls, where)} if calls in message else {})
        for message in value
    ]


def _messages_of(record: Mapping[str, Any], where: str, field: str | None) -> list[Messages]:
    decoded = {name: _decoded(record[name], name, where) for name in _TALK if name in record}
    record = {**record, **decoded}

    def messages(name: str) -> Messages:
        value = record[name]
        if isinstance(value, str):
            value = [{"role": "user" if name == "prompt" else "assistant", "content": value}]
        if not _are_messages(value):
            raise ValueError(
                f"{where} has a field '{name}' that is neither a string nor messages with a role"
            )
        return value

    def answered(name: str) -> Messages:
        answer = messages(name)
        if "prompt" not in has:
            return answer
        # Published preferences have whole conversations, and beside them the prompt once more.
        whole = isinstance(record["prompt"], str) and answer[:1] and answer[0]["role"] in _ASKING
        return answer if whole else messages("prompt") + answer

    has = {name for name in FIELDS if record.get(name) is not None}
    forms = forms_of(has)
    if _form(has, field) == "label":
        forms = ["label"]
    if not forms:
        raise ValueError(
            f"{where} has neither messages, nor prompt and completion, nor chosen and rejected; it "
            f"has {', '.join(map(repr, record))}"
        )
    if len(forms) > 1 and field not in forms:
        raise ValueError(
            f"{where} may be read by its {' or by its '.join(forms)}: say which, as in "
            f"--field {min(forms)}"
        )
    form = field if field in forms else forms[0]
    if form == "messages":
        return [messages("messages")]
    form = "completion" if form == "label" else form
    return [answered(name) for name in (("chosen", "rejected") if form == "chosen" else [form])]


def _form(has: set[str], field: str | None) -> str | None:
    """The form "label" of a record that has one and is not said to be read by another."""
    said = field in FORMS and FORMS[field] <= has
    others = {"messages", "chosen"} & set(forms_of(has))
    return "label" if FORMS["label"] <= has and not others and not said else field


def _labelled(answer: Conversation, record: Mapping[str, Any], where: str) -> list[Conversation]:
    """An answer as one side of a preference, whose other side is empty."""
    label = {"true": True, "false": False}.get(str(record["label"]).lower(), record["label"])
    if label not in (True, False):
        raise ValueError(f"{where} has the label {label!r}: give true or false")
    empty = Conversation(answer.name, b"", (), ())
    sides = (answer, empty) if label else (empty, answer)
    return [
        each._replace(side=side) for each, side in zip(sides, ("chosen", "rejected"), strict=True)
    ]


def _check_texts(messages: Messages) -> None:
    """Refuses what Jinja would print as Python does."""
    for turn, message in enumerate(messages, 1):
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            raise ValueError(
                f"the content of turn {turn} is of type {type(content).__name__}: make text of it, "
                "or give the template of a model that reads such"
            )


def _without_prompt(chosen: Conversation, rejected: Conversation, where: str) -> list[Conversation]:
    """Lets those turns count alone from which on the sides of a preference differ."""
    common = 0
    for ours, theirs in zip(chosen.counted, rejected.counted, strict=False):
        if ours != theirs or chosen.text[: ours[1]] != rejected.text[: ours[1]]:
            break
        common += 1
    if common in (len(chosen.counted), len(rejected.counted)):
        raise ValueError(f"{where} prefers a conversation to itself, or to its beginning: drop it")
    return [
        each._replace(counted=each.counted[common:], side=side)
        for each, side in ((chosen, "chosen"), (rejected, "rejected"))
    ]


def _read(marked: str, special: str) -> tuple[bytes, tuple[Span, ...], tuple[Span, ...]]:
    """Takes the marks out of a rendered text, and says where they stood."""
    parts, size, counted, tokens, begun = [], 0, [], [], 0
    # A token of one letter has no inside: the mark follows it, as it does where one spells another.
    pattern = _MARKS.pattern + (f"|(?:{special})(?!{_INSIDE})" if special else "")
    for number, piece in enumerate(re.split(f"({pattern})", marked)):
        if piece == _BEGIN:
            begun = size
        elif piece == _END:
            counted += [(begun, size)] if size > begun else []
        elif piece and piece != _INSIDE:
            data = piece.encode("utf-8")
            if number % 2:
                tokens.append((size, size + len(data)))
            parts.append(data)
            size += len(data)
    return b"".join(parts), tuple(counted), tuple(tokens)


def _spelled(token: re.Match[str]) -> str:
    bare = token[0].strip() or token[0]
    return token[0].replace(bare, _INSIDE.join(bare) + _INSIDE)


def _may_go_on(text: str, special: str) -> bool:
    """Whether a special token may begin at the end of a text, and go on in what a template puts
    after it. Names, as of roles, do not count: templates compare them."""
    begins, longest = _beginnings(special)
    return not text.isidentifier() and any(text[-n:] in begins for n in range(1, longest + 1))


@functools.lru_cache
def _beginnings(special: str) -> tuple[frozenset[str], int]:
    """Returns what the tokens of a `special_pattern` begin with, less than all, and its length."""
    space = r"\s*"
    tokens = [
        re.sub(r"\\(.)", r"\1", each.removeprefix(space).removesuffix(space), flags=re.DOTALL)
        for each in re.findall(r"(?:\\.|[^|\\])+", special, re.DOTALL)
    ]
    longest = max(map(len, tokens), default=1) - 1
    return frozenset(token[:n] for token in tokens for n in range(1, len(token))), longest


def _tick() -> None:
    """Ends a template that takes too long; every turn of a loop and every macro begins with it."""
    if time.thread_time() > _clock.end:
        raise ValueError(f"it has not ended in {SECONDS:g} s")


def _check_operands(operator: str, first: Any, second: Any) -> None:
    """Raises ValueError for one operation that may take long, because no clock is read within."""
    sizes = [len(x) if hasattr(x, "__len__") else x for x in (first, second)]
    bits = [x.bit_length() for x in sizes if isinstance(x, int)]
    if operator == "%" and isinstance(first, str):
        huge = _HUGE_WIDTH.search(first)
    elif len(bits) < 2:  # of a float, which stays small
        huge = False
    elif operator == "**":
        huge = bits[0] * abs(second) > _HUGE
    else:
        huge = sum(bits) > _HUGE if sizes == [first, second] else sizes[0] * sizes[1] > _HUGE
    if huge:
        raise ValueError(f"an operation {operator} makes something huge")


@functools.lru_cache
def _compiled(text: str) -> tuple[Any, bool]:
    """Compiles a template in the sandbox, with what transformers gives it, but for the date; also
    returns whether it marks spans."""
    parts = "jinja2.ext", "jinja2.sandbox"
    jinja2 = extras.load("chat templates need jinja2", "chat", *parts)
    spans = []

    class Generation(jinja2.ext.Extension):
        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> list[Any]:
            spans.append(next(parser.stream))
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            begin, end = (
                jinja2.nodes.Output([jinja2.nodes.TemplateData(mark)]) for mark in (_BEGIN, _END)
            )
            return [begin, *body, end]

    def fail(message: str) -> None:
        raise jinja2.TemplateError(message)

    def to_json(value: Any, indent: int | None = None, **options: Any) -> str:
        if isinstance(value, _JsonText):
            objects = _from_json(value.rstrip(_INSIDE))
            value = value if objects is None else objects
        return json.dumps(value, **{"ensure_ascii": False} | options, indent=indent)

    class Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset(["**", "*", "%"])

        def call_binop(self, context: Any, operator: str, *operands: Any) -> Any:
            _check_operands(operator, *operands)
            return super().call_binop(context, operator, *operands)

    environment = Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    environment.tick = _tick
    del environment.globals["lipsum"]  # writes any number of words
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = fail
    nodes = jinja2.nodes
    try:
        tree = environment.parse(text)
        for loop in [*tree.find_all((nodes.For, nodes.Macro))]:
            call = nodes.Call(nodes.EnvironmentAttribute("tick"), [], [], None, None)
            loop.body.insert(0, nodes.ExprStmt(call).set_lineno(loop.lineno))
        code = environment.compile(tree)
        names = environment.make_globals(None)
        return environment.template_class.from_code(environment, code, names), bool(spans)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(
            f"the chat template is not Jinja (line {error.lineno}: {error.message})"
        ) from None
