"""Constraints of an answer's text: its form, the tools that it may call, the tokens of its thought."""

from __future__ import annotations

from msgspec import Struct


class JsonSchema(Struct, frozen=True, tag="json_schema"):
    """The answer is a JSON document that a JSON Schema accepts.

    schema         JSON text of the schema
    whitespace     whether a little white space is allowed between the document's tokens
    lenient        whether keywords that cannot be enforced are ignored; if not, they are refused
    coerce_one_of  whether oneOf is treated as anyOf if its subschemas cannot be shown to exclude each other
    """

    schema: str
    whitespace: bool = True
    lenient: bool = False
    coerce_one_of: bool = False


class JsonObject(Struct, frozen=True, tag="json_object"):
    """The answer is any JSON object."""

    whitespace: bool = True


class Regex(Struct, frozen=True, tag="regex"):
    """The whole answer matches a regular expression, in the syntax of Rust's regex crate."""

    pattern: str


class Choice(Struct, frozen=True, tag="choice"):
    """The answer is one of `options`."""

    options: tuple[str, ...]


class Lark(Struct, frozen=True, tag="lark"):
    """The answer is derived from `start` of a Lark grammar, in llguidance's dialect."""

    grammar: str


class Ebnf(Struct, frozen=True, tag="ebnf"):
    """The answer is derived from `root` of a grammar whose rules are written `name ::= ...` (GBNF)."""

    grammar: str


class StructuralTag(Struct, frozen=True, tag="structural_tag"):
    """Free text in which given strings open constrained blocks: `structural_tag` of vLLM and SGLang.

    description  JSON text of an object with `structures` and `triggers`, or with `format`
    """

    description: str


class Thought(Struct, frozen=True):
    """A thought that precedes the answer, between two marks.

    inside    whether the prompt has opened the thought; if not, the model may open a thought
    newlines  maximum newlines between the closing mark and the answer; they belong neither to the thought nor to the
              answer
    marks     parts of the marks that may be single tokens of the vocabulary; empty: both marks
    after     text that follows the closing mark, before every kind of answer
    variants  other opening marks that models write too
    """

    opening: str
    closing: str
    inside: bool = False
    newlines: int = 2
    marks: tuple[str, ...] = ()
    after: str = ""
    variants: tuple[str, ...] = ()


class AfterThought(Struct, frozen=True, tag="after_thought"):
    """The answer after the thought is constrained; the thought is any text."""

    thought: Thought
    answer: Constraint


class Header(Struct, frozen=True):
    """The text that a model writes before an answer without calls.

    marks    see CallSyntax
    closing  text that may follow the answer, and after which calls may follow; empty: nothing follows the answer
    end      text that follows `closing` if no call follows it
    """

    text: str
    marks: tuple[str, ...]
    closing: str = ""
    end: str = ""


class Headed(Struct, frozen=True, tag="headed"):
    """The constrained answer follows a header. answer: its constraint; None: any text without the header's marks."""

    header: Header
    answer: Plain | None


class CallSyntax(Struct, frozen=True):
    """The syntax of a model family's tool calls: begin call (between call)* end.

    call       the syntax of a call: contains $name at least once, then $arguments, a JSON object, once; the model
               chooses a number for $number and nine letters or digits for $id
    trigger    beginning of the first call, which no other text contains; empty if no text may precede a call
    marks      parts of these texts that may be single tokens of the vocabulary; a part that is a single token must be
               generated as that token
    parameter  the syntax of an argument, if $arguments is a sequence of arguments: contains $key once, then $value,
               then a mark, which may contain $key too; strings are written without quotes. Empty: $arguments is an
               object
    document   the syntax of an argument that is not a string, whose value is JSON. Empty: as `parameter`
    excluded   other texts that would end a call, so no string in the arguments may contain them
    between    text between two calls; None: an answer contains at most one call
    separator  text between two arguments
    quoted     whether `$value` is JSON for strings too; keys are then identifiers
    constants  texts of true, false and null, for arguments whose schema allows only booleans or only null
    otherwise  regular expression of an answer without calls, which must not contain any of `marks` either; set if an
               answer with calls begins with a call. Empty: text may precede and follow calls
    """

    call: str
    trigger: str
    marks: tuple[str, ...]
    begin: str = ""
    between: str | None = "\n"
    end: str = ""
    parameter: str = ""
    document: str = ""
    excluded: tuple[str, ...] = ()
    separator: str = ""
    quoted: bool = False
    constants: tuple[str, str, str] = ("true", "false", "null")
    otherwise: str = ""


class ToolSchema(Struct, frozen=True):
    """A tool that may be called.

    parameters  JSON text of the schema of its arguments, which are an object
    param       request field of the schema or grammar, for error messages
    lark        Lark grammar of the only argument, a string named "input"; empty: the schema alone restricts it
    """

    name: str
    parameters: str
    param: str
    lark: str = ""


class Calls(Struct, frozen=True, tag="calls"):
    """The answer calls tools, with arguments that the tools' schemas accept.

    required   whether the answer must consist of calls; if not, an answer without calls must satisfy `otherwise`
    parallel   whether the answer may contain several calls
    otherwise  constraint of an answer without calls; None: any text, which may also precede and follow calls
    """

    syntax: CallSyntax
    tools: tuple[ToolSchema, ...]
    required: bool
    parallel: bool = True
    otherwise: Constraint | None = None


class Continuation(Struct, frozen=True, tag="continuation"):
    """The constrained answer continues the prompt's text, so decoding must not drop a space at the answer's start."""

    answer: Plain | Calls | Headed | AfterThought


Plain = JsonSchema | JsonObject | Regex | Choice | Lark | Ebnf | StructuralTag
Constraint = Plain | Calls | Headed | AfterThought | Continuation


class ThoughtBudget(Struct, frozen=True, tag="thought_budget"):
    """The thought has at most `tokens` tokens between its marks. At that limit, one of the texts `forced` must follow.

    openings  marks, one of which opens a thought: at the answer's beginning, or anywhere if `again`
    closings  marks that end a thought
    forced    texts, each of which contains a closing mark
    inside    whether the prompt has opened the thought
    again     whether further thoughts may follow; `tokens` limits all of them together
    marks     marks that end a thought only as tokens of the vocabulary, if the prompt or such a token has opened it
    answer    constraint of the whole answer; None: any text
    """

    tokens: int
    openings: tuple[str, ...]
    closings: tuple[str, ...]
    forced: tuple[str, ...]
    inside: bool = False
    again: bool = False
    marks: frozenset[str] = frozenset()
    answer: Constraint | None = None


Restriction = Constraint | ThoughtBudget
