"""``/v1/tokenizers`` with the peer's statuses and JSON (smg 1.13.0)."""

from __future__ import annotations

from control_rig import running
from fleet import eventually

from extproc.control import schemas
from extproc.text.entry import LibrarySettings
from extproc.text.library import Library
from tests.tokenizers_made import CHATML, directory


def library():
    return Library(LibrarySettings(), lambda: (), None)


async def test_adding_showing_and_removing(tmp_path):
    model = directory(tmp_path / "m")
    (tmp_path / "own.jinja").write_text(CHATML.replace("im_start", "begin"))
    made = library()
    async with running(tokenizers=made) as api:
        body = {"name": "org/m", "source": str(model), "chat_template_path": str(tmp_path / "own.jinja")}
        added = await api.ask("POST", "/v1/tokenizers", json=body)
        assert added.status == 202
        schemas.TokenizerProgress.model_validate(added.json)
        message = f"Tokenizer 'org/m' registration job submitted. Loading from: {model}"
        assert added.json == {"id": added.json["id"], "status": "pending", "message": message}

        async def status():
            return (await api.get("/v1/tokenizers/org/m/status")).json

        assert (await status())["status"] in ("pending", "processing", "completed")
        await eventually(lambda: made.get("org/m").ready is not None)
        size = made.get("org/m").ready.tokenizer.vocab_size
        done = {"message": "Tokenizer 'org/m' is loaded and ready", "vocab_size": size}
        assert await status() == {"id": added.json["id"], "status": "completed"} | done
        assert "begin" in made.get("org/m").ready.tokenizer._template

        shown = {"id": added.json["id"], "name": "org/m", "source": str(model), "vocab_size": size}
        assert (await api.get("/v1/tokenizers")).json == {"tokenizers": [shown]}
        assert (await api.get("/v1/tokenizers/org/m")).json == shown
        assert (await api.get(f"/v1/tokenizers/{shown['id']}")).json == shown
        again = await api.ask("POST", "/v1/tokenizers", json=body)
        expected = {"id": shown["id"], "status": "failed", "message": "Tokenizer 'org/m' already exists"}
        assert (again.status, again.json) == (409, expected)

        gone = await api.ask("DELETE", f"/v1/tokenizers/{shown['id']}")
        assert (gone.status, gone.json) == (200, {"success": True, "message": "Tokenizer 'org/m' removed successfully"})
        gone = await api.ask("DELETE", "/v1/tokenizers/org/m")
        assert (gone.status, gone.json) == (404, {"success": False, "message": "Tokenizer 'org/m' not found"})
    await made.stop()


async def test_one_that_cannot_be_loaded_says_why():
    made = library()
    async with running(tokenizers=made) as api:
        await api.ask("POST", "/v1/tokenizers", json={"name": "m", "source": "/nowhere"})
        await eventually(lambda: made.get("m").reason != "")
        status = await api.get("/v1/tokenizers/m/status")
        assert status.json["status"] == "failed"
        assert "/nowhere: no tokenizer files there" in status.json["message"]
        assert (await api.get("/v1/tokenizers")).json == {"tokenizers": []}
        shown = await api.get("/v1/tokenizers/m")
        assert (shown.status, shown.json["error"]["code"]) == (404, "tokenizer_not_found")
    await made.stop()


async def test_what_is_not_understood():
    async with running(tokenizers=library()) as api:
        for body, says in (({"name": "m"}, "source"), ({"name": "", "source": "x"}, "name"), ([], "")):
            answer = await api.ask("POST", "/v1/tokenizers", json=body)
            assert (answer.status, answer.json["error"]["code"]) == (400, "invalid_type")
            assert says in answer.json["error"]["message"]
    async with running() as api:
        answer = await api.ask("POST", "/v1/tokenizers", json={"name": "m", "source": "x"})
        assert answer.status == 503
