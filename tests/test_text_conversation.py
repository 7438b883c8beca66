"""Messages, as templates and engines want them."""

from __future__ import annotations

import jinja2
import pytest

from extproc.errors import GatewayError
from extproc.generation.asked import ChatPrompt
from extproc.text.conversation import Style, suited
from extproc.text.files import FilesError
from extproc.text.hf import load
from tests.tokenizers_made import CHATML, directory

PARTS = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
LOOPS = {
    "a loop": "{% for m in messages %}{% for part in m['content'] %}{{ part.text }}{% endfor %}{% endfor %}",
    "an attribute": "{% for m in messages %}{% for p in m.content | list %}{{ p.text }}{% endfor %}{% endfor %}",
    "a name": "{% for m in messages %}{% set c = m.content %}{% for p in c[1:] %}{{ p.text }}{% endfor %}{% endfor %}",
    "a macro": "{% macro show(c) %}{% for p in c %}{{ p.text }}{% endfor %}{% endmacro %}"
    "{% for m in messages %}{{ show(m.content) }}{% endfor %}",
}


def style(template, runtime="vllm"):
    return Style.of(template, jinja2.Environment(autoescape=True).parse(template), runtime)


@pytest.mark.parametrize("name", LOOPS)
def test_templates_that_go_through_contents_are_known(name):
    assert style(LOOPS[name]).parts


@pytest.mark.parametrize("template", [CHATML, "{% for p in messages %}{{ p.content }}{% endfor %}", "{{ x(y) }}"])
def test_others_take_texts(template):
    assert not style(template).parts


def test_sglang_takes_templates_of_media_for_such():
    assert style(CHATML + "{# vision #}", "sglang").parts
    assert not style(CHATML + "{# vision #}").parts


def test_parts_become_the_text_that_the_engine_would_make():
    messages = [{"role": "user", "content": [*PARTS, "three"]}]
    assert suited(messages, style(CHATML))[0]["content"] == "one\ntwo\nthree"
    assert suited(messages, style(CHATML, "sglang"))[0]["content"] == "one two three"


def test_a_text_becomes_parts_where_the_engine_makes_them():
    messages = [{"role": "user", "content": "one"}, {"role": "tool", "content": PARTS, "tool_call_id": "x"}]
    made = suited(messages, style(LOOPS["a loop"]))
    assert made[0]["content"] == [{"type": "text", "text": "one"}]
    assert made[1]["content"] == "one\ntwo"
    assert suited(messages, style(LOOPS["a loop"], "sglang"))[0]["content"] == "one"


def test_a_message_without_content_has_an_empty_one():
    assert suited([{"role": "assistant", "content": None, "name": None}], style(CHATML)) == [
        {"role": "assistant", "content": ""}
    ]


@pytest.mark.parametrize(
    ("arguments", "made"),
    [('{"x": 1}', {"x": 1}), ("", {}), ("not json", {}), ("[1]", {}), ({"x": 2}, {"x": 2}), (None, {})],
)
def test_arguments_of_tool_calls_are_objects(arguments, made):
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "tool_calls": [call]}, {"role": "assistant", "tool_calls": []}]
    first, second = suited(messages, style(CHATML))
    assert first["tool_calls"][0]["function"] == {"name": "f", "arguments": made}
    assert "tool_calls" not in second
    assert call["function"]["arguments"] == arguments  # the client's are as they were


def test_developers_speak_as_the_system_to_templates_that_do_not_know_them():
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": "hi"},
        {"role": "system", "content": PARTS},
    ]
    made = suited(messages, style(CHATML))
    assert made == [{"role": "system", "content": "be brief\n\none\ntwo"}, {"role": "user", "content": "hi"}]
    assert suited(messages, style(CHATML + "{# 'developer' #}"))[0]["role"] == "developer"
    assert suited(messages, style(CHATML, "sglang"))[0]["role"] == "developer"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load(directory(tmp_path_factory.mktemp("chat")))


def chat(tokenizer, *messages, **more):
    return tokenizer.chat(ChatPrompt([{"role": role, "content": content} for role, content in messages], **more))


def test_a_conversation_is_written_as_the_template_says(tokenizer):
    assert chat(tokenizer, ("user", "hi")) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert not chat(tokenizer, ("user", "hi"), add_generation_prompt=False).endswith("assistant\n")
    assert chat(tokenizer, ("user", PARTS)).startswith("<|im_start|>user\none\ntwo<|im_end|>")


def test_the_last_message_can_be_left_open(tokenizer):
    text = chat(
        tokenizer, ("user", "hi"), ("assistant", "Hel"), add_generation_prompt=False, continue_final_message=True
    )
    assert text.endswith("<|im_start|>assistant\nHel")


def test_a_template_has_the_clients_arguments_but_not_ours(tokenizer):
    template = "{{ mood }}{{ messages | length }}{{ tools | length if tools }}"
    how = {"mood": "calm ", "tokenize": True, "tools": None, "messages": [], "conversations": [], "self": 1}
    tools = ({"type": "function", "function": {"name": "f"}},)
    text = chat(tokenizer, ("user", "hi"), chat_template=template, template_kwargs=how, tools=tools)
    assert text == "calm 11"


TURNS = [("system", "be brief"), ("user", "low é"), ("assistant", "<b>&"), ("user", "more")]
OF_MODELS = {
    "chatml": CHATML,
    "with special tokens": "{{ bos_token }}{% for m in messages %}{{ m.role | upper }}: {{ m.content | trim }}"
    "{{ eos_token }}{% endfor %}{{ documents | tojson if documents }}{{ tools | tojson(indent=2) if tools }}",
    "with blocks": "{%- for m in messages %}\n    {%- if loop.first and m.role == 'system' %}\n[{{ m.content }}]\n"
    "    {%- elif m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}\n    {%- else %}"
    "{{ m['content'] }}{% break %}\n    {%- endif %}\n{%- endfor %}",
}


@pytest.mark.parametrize("name", OF_MODELS)
def test_it_is_what_transformers_makes_of_it(tokenizer, name):
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"x": "<é>"}}}]
    documents = [{"title": "t", "text": "x"}]
    ours = chat(tokenizer, *TURNS, chat_template=OF_MODELS[name], tools=tools, documents=documents)
    theirs = tokenizer._loaded.apply_chat_template(
        [{"role": role, "content": content} for role, content in TURNS],
        chat_template=OF_MODELS[name],
        tools=tools,
        documents=documents,
        add_generation_prompt=True,
        tokenize=False,
    )
    assert ours == theirs


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].nothing.more }}", "has no attribute"),
        ("{% for %}", "Expected"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
    ],
)
def test_what_a_template_complains_of_is_the_clients_to_know(tokenizer, template, says):
    with pytest.raises(GatewayError, match=says) as raised:
        chat(tokenizer, ("user", "hi"), chat_template=template)
    assert (raised.value.fault.code, raised.value.status) == ("process_messages_failed", 400)


def test_a_model_without_a_template_says_so(tmp_path):
    tokenizer = load(directory(tmp_path, template=None))
    assert not tokenizer.has_template
    with pytest.raises(GatewayError, match="--chat-template"):
        chat(tokenizer, ("user", "hi"))
    (tmp_path / "own.txt").write_text(CHATML)
    assert chat(load(tmp_path, template=str(tmp_path / "own.txt")), ("user", "hi")).startswith("<|im_start|>")


def test_one_of_several_templates_can_be_named(tmp_path):
    directory(tmp_path, template=None)
    (tmp_path / "chat_template.jinja").write_text(CHATML)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "short.jinja").write_text("{{ messages[0].content }}")
    assert chat(load(tmp_path), ("user", "hi")).startswith("<|im_start|>")
    assert chat(load(tmp_path, template="short"), ("user", "hi")) == "hi"
    with pytest.raises(FilesError, match=r"long.*short"):
        load(tmp_path, template="long")
