"""Prompts become the tokens that the engine's own server would make of them, or an error before a leg is sent."""

from __future__ import annotations

import asyncio
import threading

import orjson
import pytest
from fleet import eventually
from hypothesis import given, settings
from hypothesis import strategies as st

from extproc.apis.table import CHAT, COMPLETIONS, COUNT_TOKENS, DETOKENIZE, GENERATE, TOKENIZE
from extproc.errors import GatewayError
from extproc.generation.asked import Asked, ChatPrompt
from extproc.generation.sampling import Sampling
from extproc.text.cache import CacheSettings, EncodeCache
from extproc.text.endpoints import TextEndpoints
from extproc.text.entry import Entry, LibrarySettings, Ready
from extproc.text.hf import load
from extproc.text.library import Library
from extproc.text.limits import Limits
from extproc.text.service import INLINE_CHARACTERS, Texts
from extproc.text.threads import Threads
from extproc.workers.worker import Role, Worker, WorkerUrl
from tests.tokenizers_made import directory

USER = {"role": "user", "content": "low"}
LONG = "lower low " * 500


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load(directory(tmp_path_factory.mktemp("byte_level")))


def worker(runtime="vllm", **labels):
    made = Worker("w", WorkerUrl.parse("grpc://w:1"), Role.DECODE, runtime=runtime)
    made.model_ids, made.labels = ("tiny",), {name: str(value) for name, value in labels.items()}
    return made


def ready(tokenizer, cache=None):
    encoder = EncodeCache(
        lambda text, special: tokenizer.encode(text, special=special),
        tokenizer.special_texts,
        cache or CacheSettings(),
    )
    return Ready("tiny", tokenizer, encoder, "mark")


def texts_with(tokenizer, *workers, threads=None, **more):
    library = Library(LibrarySettings(), lambda: workers, None)
    if tokenizer is not None:
        library._entries["tiny"] = Entry("tiny", ready=ready(tokenizer))
    return Texts(library, threads or Threads(1), lambda: workers, **more)


@pytest.fixture
def texts(tokenizer):
    made = texts_with(tokenizer, worker(max_context_length=64, vocab_size=600))
    yield made
    made.stop()


def asked(api=COMPLETIONS, *prompts, model="tiny", sampling=None, **more):
    return Asked(api, model, sampling or Sampling(), prompts=prompts, **more)


def prepared(texts, request):
    """What comes of a request that is prepared at once."""
    found = []
    texts.prepare(request, found.append)
    assert len(found) == 1
    return found[0]


async def later(texts, request):
    future = asyncio.get_running_loop().create_future()
    texts.prepare(request, future.set_result)
    assert not future.done()
    return await future


def test_raw_prompts_get_the_special_tokens_and_conversations_do_not(texts, tokenizer):
    low = tokenizer.encode("low", special=False)
    assert prepared(texts, asked(COMPLETIONS, "low"))[0] == ("low", (0, *low))
    assert prepared(texts, asked(GENERATE, "low", special=False))[0].ids == tuple(low)
    (chat,) = prepared(texts, asked(CHAT, chat=ChatPrompt([USER])))
    assert chat.text == "<|im_start|>user\nlow<|im_end|>\n<|im_start|>assistant\n"
    assert chat.ids == tuple(tokenizer.encode(chat.text, special=False))
    (more,) = prepared(texts, asked(CHAT, chat=ChatPrompt([USER], add_special_tokens=True)))
    assert more.ids == (0, *chat.ids)


def test_ids_stay_as_they_are(texts, tokenizer):
    ids = tuple(tokenizer.encode("low lower", special=False))
    assert prepared(texts, asked(COMPLETIONS, ids, "low"))[0] == ("", ids)
    assert prepared(texts, asked(COMPLETIONS, ids, echo=True))[0] == ("low lower", ids)


@pytest.mark.parametrize("request_", [asked(COMPLETIONS, "low " * 80), asked(CHAT, chat=ChatPrompt([USER] * 20))])
def test_a_prompt_that_is_too_long_is_refused(texts, request_):
    error = prepared(texts, request_)
    assert (error.fault.code, error.status) == ("context_length_exceeded", 400)
    assert "64 tokens" in error.message
    assert error.param in ("prompt", "messages")


def test_of_several_prompts_each_is_looked_at(texts):
    samplings = (Sampling(max_tokens=1), Sampling(max_tokens=65))
    error = prepared(texts, asked(GENERATE, "low", "low", samplings=samplings))
    assert error.fault.code == "context_length_exceeded"


def test_a_text_that_cannot_fit_is_not_tokenised(tokenizer):
    texts = texts_with(tokenizer, worker(max_context_length=8))
    assert "characters" in prepared(texts, asked(COMPLETIONS, "low " * 200)).message
    assert tokenizer.longest * 8 < 800


def test_without_a_tokenizer_it_says_so():
    error = prepared(texts_with(None), asked(COMPLETIONS, "low"))
    assert (error.fault.code, error.status, error.retry_after) == ("tokenizer_not_found", 503, 5)
    assert texts_with(None).of("tiny") is None


def test_a_request_without_a_model_has_the_first_tokenizer(texts, tokenizer):
    assert texts.of(None) is tokenizer
    assert prepared(texts, asked(COMPLETIONS, "low", model=None))[0].ids


def test_templates_of_requests_are_taken_only_where_the_operator_trusts_them(texts, tokenizer):
    own = asked(CHAT, chat=ChatPrompt([USER], chat_template="{{ messages[0].content }}"))
    assert prepared(texts, own).fault.code == "process_messages_failed"
    trusting = texts_with(tokenizer, trust_templates=True)
    assert prepared(trusting, own)[0].text == "low"


class TestLong:
    async def test_long_prompts_are_tokenised_in_a_thread(self, tokenizer):
        texts = texts_with(tokenizer)
        names = []
        real = tokenizer.encode
        spy = ready(tokenizer)
        spy.encoder._encode = lambda text, special: (
            names.append(threading.current_thread()) or real(text, special=special)
        )
        texts.library._entries["tiny"].ready = spy
        assert len(LONG) > INLINE_CHARACTERS
        (found,) = await later(texts, asked(COMPLETIONS, LONG))
        assert found.ids == (0, *tokenizer.encode(LONG, special=False))
        prepared(texts, asked(COMPLETIONS, "low"))
        chat = await later(
            texts, asked(CHAT, chat=ChatPrompt([{"role": "user", "content": [{"type": "text", "text": LONG}]}]))
        )
        assert LONG in chat[0].text
        assert [thread is threading.main_thread() for thread in names] == [False, True, False]
        texts.stop()

    async def test_errors_come_back_from_the_thread(self, tokenizer):
        texts = texts_with(tokenizer, worker(max_context_length=500))
        error = await later(texts, asked(COMPLETIONS, LONG))
        assert error.fault.code == "context_length_exceeded"
        texts.stop()

    async def test_short_prompts_do_not_wait_for_long_ones(self, tokenizer):
        threads, gate = Threads(1), threading.Event()
        texts = texts_with(tokenizer, threads=threads)
        threads.run(gate.wait, lambda _: None)
        waiting = []
        texts.prepare(asked(COMPLETIONS, LONG), waiting.append)
        assert len(prepared(texts, asked(COMPLETIONS, "low"))) == 1
        assert not waiting
        gate.set()
        await eventually(lambda: bool(waiting))
        texts.stop()

    async def test_nobody_is_told_of_what_was_cancelled(self, tokenizer):
        threads, gate = Threads(1), threading.Event()
        texts = texts_with(tokenizer, threads=threads)
        found = []
        running = threads.run(gate.wait, found.append)
        cancel = texts.prepare(asked(COMPLETIONS, LONG), found.append)
        cancel()
        running()
        cancel()
        gate.set()
        await eventually(lambda: threads.under_way == 0)
        assert found == []
        texts.stop()

    async def test_only_so_many_may_wait(self, tokenizer):
        threads, gate = Threads(1, most_waiting=1), threading.Event()
        texts = texts_with(tokenizer, threads=threads)
        found = []
        threads.run(gate.wait, lambda _: None)
        texts.prepare(asked(COMPLETIONS, LONG), found.append)
        error = prepared(texts, asked(COMPLETIONS, LONG))
        assert (error.fault.code, error.status, error.retry_after) == ("tokenization_queue_full", 503, 1)
        gate.set()
        await eventually(lambda: len(found) == 1 and threads.under_way == 0)
        texts.stop()

    async def test_a_defect_is_told_as_one(self, tokenizer, caplog):
        texts = texts_with(tokenizer)
        broken = ready(tokenizer)

        def fail(_text, _special):
            raise ZeroDivisionError

        broken.encoder._encode = fail
        texts.library._entries["tiny"].ready = broken
        for text in ("low", LONG):
            future = asyncio.get_running_loop().create_future()
            texts.prepare(asked(COMPLETIONS, text), future.set_result)
            assert (await future).fault.code == "tokenization_failed"
        assert caplog.text.count("could not be tokenised") == 2
        texts.stop()


class TestLimits:
    @pytest.mark.parametrize(
        ("runtime", "tokens", "max_tokens", "refused"),
        [
            ("vllm", 99, None, False),
            ("vllm", 100, None, True),
            ("vllm", 100, 0, False),
            ("vllm", 50, 100, False),  # the answer is as long as there is room
            ("vllm", 50, 101, True),
            ("sglang", 93, None, False),
            ("sglang", 94, None, True),
            ("sglang", 50, 50, False),
            ("sglang", 50, 51, True),
            ("tokenspeed", 50, 51, True),
        ],
    )
    def test_they_are_the_engines(self, runtime, tokens, max_tokens, refused):
        labels = {"max_context_length": "100", "max_req_input_len": "94"}
        limits = Limits.of([(runtime, labels)])
        if not refused:
            limits.check(tokens, max_tokens, "prompt")
            return
        with pytest.raises(GatewayError) as raised:
            limits.check(tokens, max_tokens, "prompt")
        assert raised.value.fault.code == "context_length_exceeded"

    def test_the_least_of_all_workers_counts(self):
        limits = Limits.of(
            [("vllm", {"max_context_length": "100"}), ("vllm", {"max_context_length": "80"}), ("vllm", {})]
        )
        assert limits.context == 80

    def test_what_workers_do_not_say_is_not_checked(self):
        Limits.of([("sglang", {})]).check(10**9, 10**9, "prompt")

    def test_they_follow_the_workers(self, tokenizer):
        workers = [worker(max_context_length=10)]
        texts = texts_with(tokenizer, *workers)
        assert texts.limits("tiny").context == 10
        workers[0].labels = {"max_context_length": "20"}
        texts.workers_changed()
        assert texts.limits("tiny").context == 20


class TestEndpoints:
    async def answer(self, texts, api, body, runtime="vllm"):
        future = asyncio.get_running_loop().create_future()
        raw = body if isinstance(body, bytes) else orjson.dumps(body)
        TextEndpoints(texts, lambda _: runtime).answer(api, raw, "tiny", future.set_result)
        found = await future
        if isinstance(found, GatewayError):
            raise found
        return orjson.loads(found)

    async def test_a_text_is_tokenised(self, texts, tokenizer):
        ids = tokenizer.encode("low é", special=True)
        found = await self.answer(texts, TOKENIZE, {"prompt": "low é", "return_token_strs": True})
        words = [tokenizer.word(token) for token in ids]
        expected = {"count": len(ids), "tokens": ids, "char_count": 5, "max_model_len": 64, "token_strs": words}
        assert found == expected
        found = await self.answer(texts, TOKENIZE, {"prompt": ["low", ""], "add_special_tokens": False})
        assert (found["tokens"], found["count"], found["char_count"]) == ([ids[1:2], []], [1, 0], [3, 0])

    async def test_a_long_text_is_not_refused(self, texts):
        assert (await self.answer(texts, TOKENIZE, {"prompt": LONG}))["count"] > 64

    async def test_a_conversation_is_tokenised(self, texts, tokenizer):
        found = await self.answer(texts, TOKENIZE, {"messages": [USER]})
        assert tokenizer.decode(found["tokens"], skip_special=False).endswith("<|im_start|>assistant\n")
        found = await self.answer(
            texts,
            TOKENIZE,
            {"messages": [USER, {"role": "assistant", "content": "lo"}], "continue_final_message": True},
        )
        assert tokenizer.decode(found["tokens"], skip_special=False).endswith("assistant\nlo")

    async def test_tokens_are_made_text(self, texts, tokenizer):
        ids = tokenizer.encode("low", special=True)
        assert await self.answer(texts, DETOKENIZE, {"tokens": ids}) == {"prompt": "<s>low", "text": "<s>low"}
        assert (await self.answer(texts, DETOKENIZE, {"tokens": ids}, "sglang"))["text"] == "low"
        found = await self.answer(texts, DETOKENIZE, {"tokens": [ids, []], "skip_special_tokens": True})
        assert found["text"] == ["low", ""]

    @pytest.mark.parametrize(
        ("api", "body", "says"),
        [
            (TOKENIZE, b"{", "no JSON"),
            (TOKENIZE, [], "not a JSON object"),
            (TOKENIZE, {"prompt": 1}, "prompt must be"),
            (TOKENIZE, {"messages": ["x"]}, "messages must be"),
            (TOKENIZE, {"messages": [USER], "chat_template": "x"}, "--trust-request-chat-template"),
            (
                TOKENIZE,
                {"messages": [USER], "continue_final_message": True, "add_generation_prompt": True},
                "Cannot set both",
            ),
            (DETOKENIZE, {"tokens": [1, "a"]}, "tokens must be"),
            (DETOKENIZE, {"tokens": [True]}, "tokens must be"),
            (DETOKENIZE, {"tokens": [[1], 2]}, "tokens must be"),
            (DETOKENIZE, {"tokens": [600]}, "out of vocabulary"),
            (COUNT_TOKENS, {"messages": []}, "messages"),
            (COUNT_TOKENS, {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "image"),
        ],
    )
    async def test_what_is_wrong_is_said(self, texts, api, body, says):
        with pytest.raises(GatewayError, match=says) as raised:
            await self.answer(texts, api, body)
        assert raised.value.status == 400

    async def test_tokens_of_messages_are_counted(self, texts):
        simple = await self.answer(texts, COUNT_TOKENS, {"system": "new", "messages": [USER]})
        chat = {"messages": [{"role": "system", "content": "new"}, USER]}
        assert simple == {"input_tokens": (await self.answer(texts, TOKENIZE, chat))["count"]}
        turns = [
            {"role": "user", "content": [{"type": "text", "text": "low"}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "a", "name": "f", "input": {"x": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a", "content": "7"}]},
        ]
        body = {"system": [{"type": "text", "text": "new"}], "messages": turns, "tools": [{"name": "f"}]}
        assert (await self.answer(texts, COUNT_TOKENS, body))["input_tokens"] > simple["input_tokens"]


def remembering(tokenizer):
    """A cache of beginnings."""
    return ready(tokenizer, CacheSettings(l1_bytes=10**6)).encoder


@pytest.fixture(scope="module")
def cut_anywhere(tmp_path_factory):
    """Tokenizers whose texts can be cut at special tokens, with such caches."""
    made = [
        load(directory(tmp_path_factory.mktemp(kind), kind)) for kind in ("byte_level", "llama", "gemma", "wordpiece")
    ]
    caches = [(tokenizer, remembering(tokenizer)) for tokenizer in made]
    assert all(cache._prefixes is not None for _, cache in caches)
    return caches


_TURNS = st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>", "<s>", " ", "\n", "low", " lower", "é🙂", "<|im_"]))


@settings(deadline=None, max_examples=60)
@given(conversations=st.lists(_TURNS.map("".join), min_size=1, max_size=4))
def test_what_is_remembered_changes_nothing(cut_anywhere, conversations):
    for tokenizer, cache in cut_anywhere:
        for text in conversations:
            assert cache.encode(text, special=False) == tokenizer.encode(text, special=False)


class TestCache:
    @pytest.fixture
    def counted(self, tokenizer):
        seen = []

        def encode(text, special):
            seen.append(text)
            return tokenizer.encode(text, special=special)

        return seen, encode

    def test_whole_texts_are_remembered(self, tokenizer, counted):
        seen, encode = counted
        cache = EncodeCache(encode, (), CacheSettings(l0_entries=2, l0_bytes=10**6))
        for text in ("a", "b", "a", "c", "b"):  # b is forgotten for c
            assert cache.encode(text, special=True) == tokenizer.encode(text, special=True)
        assert cache.encode("c", special=False) == tokenizer.encode("c", special=False)
        assert seen == ["a", "b", "c", "b", "c"]

    def test_no_more_memory_is_used_than_may_be(self, counted):
        seen, encode = counted
        cache = EncodeCache(encode, (), CacheSettings(l0_entries=100, l0_bytes=700))
        cache.encode("x" * 5000, special=False)
        cache.encode("x" * 5000, special=False)
        for _ in range(2):
            for text in "abcd":
                cache.encode(text, special=False)
        assert len(seen) == 10
        assert cache._texts._bytes <= 700

    def test_beginnings_are_remembered(self, tokenizer, counted):
        seen, encode = counted
        cache = EncodeCache(encode, tokenizer.special_texts, CacheSettings(l1_bytes=10**6))
        turns = ["<|im_start|>system\nbe brief<|im_end|>\n", "<|im_start|>user\nlow<|im_end|>\n<|im_start|>assistant\n"]
        more = "lower.<|im_end|>\n<|im_start|>user\nnew  <|im_end|>\n<|im_start|>assistant\n"
        seen.clear()
        for text in ("".join(turns), "".join(turns) + more, "".join(turns), turns[0] + turns[1] * 3, "none at all"):
            assert cache.encode(text, special=False) == tokenizer.encode(text, special=False)
            seen.append(None)
        second = seen[seen.index(None) + 1 :]
        assert sum(map(len, second[: second.index(None)])) <= len(more) + len("<|im_start|>assistant\n")

    def test_it_is_not_cut_where_that_changes_something(self, tmp_path, caplog):
        loaded = load(directory(tmp_path, "metaspace"))
        assert remembering(loaded)._prefixes is None
        assert "no effect" in caplog.text
