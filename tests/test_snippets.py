"""The pages for beginners, run from their first command to their last."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast_formats import errors
from tests import snippets
from tests.daemons import free_port
from tests.databases import Postgres
from tests.snippets import BESIDE, TOP, Snippet

DOCS = TOP / "docs"
PAGES = [TOP / "README.md", TOP / "README.zh-CN.md", *sorted(DOCS.rglob("*.md"))]


# What the fragments of a guide take for granted: a small Llama, what trains it, and a loop that trains the saved steps.
TRAINING = """
import os, signal
from pathlib import Path
import torch
from torch.utils.data import DataLoader
from transformers import ByT5Tokenizer, LlamaConfig, LlamaForCausalLM
from holdfast import Checkpointer


class Loader:
    position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]

    def __iter__(self):
        return iter([torch.rand(1)])


sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
settings = LlamaConfig(num_attention_heads=4, num_key_value_heads=4, use_cache=False, tie_word_embeddings=False, **sizes)
model, tokenizer, config = LlamaForCausalLM(settings), ByT5Tokenizer(extra_ids=0), settings.to_dict()
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
ema, loader, steps = torch.optim.swa_utils.AveragedModel(model), Loader(), 1000
state = {"model": model, "optim": optimizer, "scheduler": scheduler, "ema": ema, "loader": loader}


def train(step):
    global loss
    if step % 500 == 0 or step < 100:
        ids = torch.randint(0, 64, (2, 8))
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
"""
# A save that nothing waits for may be dropped on a busy machine: these wait for the ones before.
IDLE = "os.system('holdfast wait --idle')"
FIRST = f"""
train_step = train


def train(step):
    if step in (500, 4000, 4500):
        {IDLE}
    train_step(step)


with Checkpointer("llama3-8b", state, assets=[model.config, tokenizer]) as first:
    train(500)
    first.save(500, metrics={{"loss": loss.item()}})
"""
SIGNALLED = """
train_step = train


def train(step):
    train_step(step)
    if step == 10:
        os.kill(os.getpid(), signal.SIGTERM)


checkpointer = Checkpointer('stops', state)
"""
STOPPED = "print(f'stopped at {step}, saved {max(os.listdir(\"holdfast-data/stops/checkpoints\"))}')"
SERVE = Snippet("sh", BESIDE, "holdfast serve --root holdfast-data --replica nas=mnt/nas/checkpoints\n")
LOOP = """
with Checkpointer("llama3-8b", state) as checkpointer:
    for step in range(checkpointer.restore() + 1, steps + 1):
        train(step)
        if step % 500 == 0:
            checkpointer.save(step, metrics={"loss": loss.item()}, wait="durable")
"""
WAIT = Snippet("sh", "", "holdfast wait --idle\n")
LIST = Snippet("sh", "", "holdfast ls llama3-8b\n")
TOKEN = Snippet("sh", "", "export HOLDFAST_TOKEN=$(holdfast token create me --scope admin)\n")
# Pages whose snippets are run here, and those that another test runs.
RUN = {
    "README.md", "docs/get-started.md", "docs/restoring.md", "docs/retention.md", "docs/saving.md", "docs/stopping.md",
    "docs/tutorials/from-torch-save.md", "docs/tutorials/fsdp2.md", "docs/tutorials/many-nodes.md", "docs/tutorials/team.md",
    "docs/when-something-went-wrong.md",
}  # fmt: skip
RUN_ELSEWHERE = {
    "docs/format.md": "tests/formats/disk/test_format_document.py",
    "docs/integrations/transformers.md": "tests/integrations/transformers/test_example.py",
    "docs/rules.md": "tests/formats/layout/rules/test_page.py",
    "docs/tutorials/trainer.md": "tests/integrations/transformers/test_example.py",
}
# Pages whose snippets are only parsed, and why.
PARSED = {
    "docs/api.md": "requests about runs of the reader",
    "docs/averages.md": "fragments of a trainer with masters: tests/daemon/averaging",
    "docs/benchmarks.md": "takes hours, with peers that are not installed",
    "docs/cli.md": "commands about runs of the reader, beside what they print: tests/client/commands",
    "docs/contents.md": "fragments about other states on each line: tests/client/state",
    "docs/dashboard.md": "opens a browser",
    "docs/foreign-checkpoints.md": "needs checkpoints of other programs: tests/wings/convert",
    "docs/index.md": "the lines of README.md",
    "docs/integrations/accelerate.md": "needs the framework: make integrations",
    "docs/integrations/dcp.md": "needs several ranks: make integrations",
    "docs/integrations/deepspeed.md": "needs the framework: make integrations",
    "docs/integrations/lightning.md": "needs the framework: make integrations",
    "docs/integrations/matrix.md": "needs the frameworks: make integrations",
    "docs/integrations/megatron.md": "needs the framework: make integrations",
    "docs/integrations/official.md": "needs checkouts of the frameworks: make official",
    "docs/integrations/paddle.md": "needs the framework: make integrations",
    "docs/integrations/paddleformers.md": "needs the framework: make integrations",
    "docs/integrations/peft.md": "needs the framework: make integrations",
    "docs/integrations/ray.md": "needs the framework: make integrations",
    "docs/integrations/torchtitan.md": "needs the framework: make integrations",
    "docs/integrations/verl.md": "needs the framework: make integrations",
    "docs/layouts.md": "needs a model of eight billion parameters: tests/formats/layout/test_document.py",
    "docs/many-nodes.md": "needs several machines: tests/cluster",
    "docs/merging.md": "needs several models: tests/wings/merge",
    "docs/operating.md": "needs systemd and a container engine: tests/test_deploy.py",
    "docs/programs.md": "needs models of several systems: tests/formats/programs",
    "docs/object-storage.md": "needs a bucket: tests/daemon/bucket",
    "docs/replicas.md": "needs a second disk, and the loss of one: tests/daemon/copying",
    "docs/security.md": "needs addresses, users and groups of a machine: tests/api/access",
    "docs/telling.md": "needs receivers of alerts: tests/wings/notify",
}
# Snippets that no test runs, by the words in them: they are parsed, and so is every `holdfast` command with its options.
NOT_RUN = {
    "torchrun": "needs eight ranks, and a script of the reader",
    "s3://": "needs a bucket, and is run by tests/client/commands/test_bucket.py",
    "make ": "is a target of the Makefile, with tests of its own in tests/demo",
}


def shell(page: str) -> list[Snippet]:
    """The page's shell snippets that can be run here, as someone who answers yes to every question."""
    found = [
        one
        for one in snippets.snippets(DOCS / page)
        if one.language == "sh" and not any(word in one.text for word in NOT_RUN)
    ]
    return [
        one._replace(
            text=re.sub(r"^(holdfast (?:keep|rm|trash)\b[^#\n]*?)( *#.*)?$", r"\1 --yes", one.text, flags=re.MULTILINE)
        )
        for one in found
    ]


def test_readme() -> None:
    """The loop of the first screen saves a directory that transformers loads."""
    parts = snippets.session(snippets.snippets(TOP / "README.md"), {0: TRAINING, 1: IDLE})
    said = snippets.run(TOP / "README.md", [SERVE], [*parts, LIST])
    assert re.search(r"^1000\t", said, re.MULTILINE), said


def fragments(page: str, before: dict[int, str]) -> list[Snippet]:
    """The page's Python snippets, one after the other in one process, after what they take for granted."""
    return snippets.session(snippets.snippets(DOCS / page), before | {0: TRAINING + before.get(0, "")})


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(TOP)))
def test_every_snippet_is_valid(page: Path) -> None:
    """Each parses in its language, each `holdfast` command exists with these options, and curl fails where HTTP does."""
    alias = re.search(r'^alias curl="(.*)"$', page.read_text(), re.MULTILINE)
    for snippet in snippets.snippets(page):
        snippets.validate(snippet, alias[1] if alias else "curl")


def test_each_page_is_run_or_says_why_not() -> None:
    """A page with commands or Python is run here or by another test, or is only parsed, with the reason."""
    code = {"sh", "bash", "python"}
    pages = {str(page.relative_to(TOP)) for page in PAGES if any(one.language in code for one in snippets.snippets(page))}
    assert RUN | RUN_ELSEWHERE.keys() | PARSED.keys() == {page for page in pages if not page.endswith(".zh-CN.md")}
    named = [*RUN_ELSEWHERE.values(), *re.findall(r"tests/[\w/.]+", " ".join(PARSED.values()))]
    assert [path for path in named if not (TOP / path).exists()] == []


def test_saving() -> None:
    """Each fragment of the page saves what it says: with metrics, files, a link, of one rank, and to another machine."""
    before = {
        0: "steps = 500",
        2: "checkpointer.restore()",
        3: f"{IDLE}\nstep = 1300\nPath('log.txt').write_text('loss 1')",
        4: f"{IDLE}\nstep = 1400",
        5: f"{IDLE}\nstep = 1500",
        6: "checkpointer.close()\ncheckpointer = Checkpointer('linked', state)\ncheckpointer.restore()",
        7: "checkpointer.close()\nassert Path('outputs/checkpoint-500/COMMIT').exists()\nrank = 0",
    }
    said = snippets.run(DOCS / "saving.md", [SERVE], [*fragments("saving.md", before), LIST])
    assert {"500", "1000", "1200", "1300", "1400", "1500"} <= set(re.findall(r"^(\d+)\t", said, re.MULTILINE)), said


def test_restoring() -> None:
    """A run is resumed, goes back to a step, is read in a script and by transformers, cut into shards, and exported."""
    before = {
        0: f"{FIRST}\nsteps = 4500",
        1: "checkpointer = Checkpointer('llama3-8b', state)",
        3: "steps = 5000",
        4: "checkpointer.close()",
    }
    parts = [*fragments("restoring.md", before), TOKEN, *shell("restoring.md")]
    said = snippets.run(DOCS / "restoring.md", [SERVE], parts)
    assert "llama3-8b 500" in said and "exported" in said and "rank3.safetensors" in said, said


def test_stopping() -> None:
    """A signal ends the loop soon, at a step that is saved: training goes on while a busy daemon has yet to answer."""
    before = {0: SIGNALLED, 1: f"checkpointer.close()\n{STOPPED}\nrows = []"}
    said = snippets.run(DOCS / "stopping.md", [SERVE], fragments("stopping.md", before))
    ((stopped, saved),) = re.findall(r"stopped at (\d+), saved step-(\d+)", said)
    assert 10 <= int(stopped) == int(saved) < 1000, said


def test_retention() -> None:
    """Rules are shown and set, a checkpoint is removed, and a run is deleted, brought back and renamed."""
    trained = [*snippets.session([Snippet("python", "", LOOP)], {0: TRAINING + "steps = 5000"}), WAIT]
    parts = shell("retention.md")
    parts.insert(0, parts.pop(3))  # before the rules remove the step that it removes
    parts.insert(-1, WAIT)  # what was brought back is read back; before that, a copy of it may be the only sound one
    said = snippets.run(DOCS / "retention.md", [SERVE, *trained], parts)
    assert "removed llama3-8b@500" in said and "llama3-8b-first-try" in said, said


def begins(said: str) -> list[int]:
    """The steps after which the page's trainings say that they begin.

    torchrun runs Python unbuffered, which writes the end of a line by itself: two ranks may share a line.
    """
    return [int(step) for step in re.findall(r"begins after step (\d+)", said)]


def test_get_started() -> None:
    """A training that is killed goes on from a step that was saved, and is listed with its checkpoints verified."""
    said = snippets.run(DOCS / "get-started.md")
    first, second = begins(said)
    assert first == 0 and 200 <= second < 3000 and second % 100 == 0
    assert re.search(r"^2900\t.*\tverified\t", said, re.MULTILINE), said
    assert "http://127.0.0.1:" in said and "model.safetensors" in said


def test_fsdp2() -> None:
    """Two ranks, of which one is killed, go on together, and one rank goes on from both."""
    said = snippets.run(DOCS / "tutorials" / "fsdp2.md")
    assert "a rank was killed" in said
    again = begins(said)[2]
    assert begins(said) == [0, 0, again, again, 200] and 0 < again <= 140
    assert "torch.Size" not in said and "(256, 32)" in said


def test_many_nodes(postgres: Postgres) -> None:
    """Two daemons save checkpoints of two ranks together, and one rank goes on with one of them."""
    page = DOCS / "tutorials" / "many-nodes.md"
    said = snippets.run(page, HOLDFAST_CATALOG=postgres.make(), HEAD=f"127.0.0.1:{free_port()}")
    assert begins(said) == [0, 0, 60]
    assert re.search(r"^60\t.*\tverified\t", said, re.MULTILINE), said


def test_team() -> None:
    """A daemon with tokens, quota, retention and alerts: what a token is not for is refused, and a death is alerted."""
    said = snippets.run(DOCS / "tutorials" / "team.md")
    assert "refused: the token is for vision-*" in said and "refused: the token only reads" in said
    assert "for the runs 'vision-*'" in said and re.search(r"^ALERT firing run-\w+ vision-1$", said, re.MULTILINE)


def test_from_torch_save() -> None:
    """A file of `torch.save` is imported, and a training goes on from it and is read without Holdfast."""
    said = snippets.run(DOCS / "tutorials" / "from-torch-save.md")
    assert begins(said) == [100]
    assert "would import  mine@100" in said and "imported  mine@100" in said
    assert "tensors: ['0.bias', '0.weight', '2.bias', '2.weight']" in said


# A run that dies in step 500, with NaN, and of which one byte changes on the disk.
DYING = """
import os, signal, torch
from holdfast import Checkpointer

model = torch.nn.Linear(64, 64)
optimizer = torch.optim.AdamW(model.parameters())
with Checkpointer("llama3-8b", {"model": model, "optim": optimizer}) as checkpointer:
    start = checkpointer.restore()
    print(f"begins after step {start}", flush=True)
    for step in range(start + 1, 601):
        model(torch.randn(8, 64)).pow(2).mean().backward()
        optimizer.step()
        if step == 500:
            checkpointer.fence()
            model.weight.data[0, 0] = torch.nan
        if step % 100 == 0:
            checkpointer.save(step, metrics={"loss": 1.0 / step}, wait="durable")
        if step == 500:
            os.kill(os.getpid(), signal.SIGKILL)
os.system("holdfast wait llama3-8b@600")
"""
BEFORE = [
    Snippet("sh", BESIDE, "holdfast serve --root holdfast-data --replica nas=nas\n"),
    Snippet("python", "train.py", DYING),
    Snippet("sh", "", "python train.py || echo died; holdfast wait llama3-8b@500\n"),
    Snippet("sh", "", "until holdfast show llama3-8b@300 | grep -q 'nas (present'; do sleep 0.2; done\n"),
    Snippet(
        "python",
        "",
        "with open('holdfast-data/llama3-8b/checkpoints/step-00000300/model.safetensors', 'r+b') as file:\n"
        "    file.seek(-5, 2)\n    file.write(b'\\x55')\n",
    ),
]


def test_when_something_went_wrong() -> None:
    """Of a run that died, with NaN and damage, each command of the page does what the page says."""
    said = snippets.run(DOCS / "when-something-went-wrong.md", BEFORE)
    assert begins(said) == [0, 500, 600]
    assert re.search(r"^llama3-8b\t.*\tdied\b", said, re.MULTILINE), said
    assert re.search(r"^model\tweight\tF32\t[1-9]", said, re.MULTILINE), said
    # The daemon sees that the file was replaced, too, and may be first.
    assert re.search(r"^repaired .*checkpoints/300|llama3-8b@300 was repaired from replica nas", said, re.MULTILINE), said
    assert re.search(r"^kept: ", said, re.MULTILINE), said


@pytest.mark.parametrize("name", ["when-something-went-wrong.md", "when-something-went-wrong.zh-CN.md"])
def test_buttons_and_codes_that_help_exist(name: str) -> None:
    """Each button and alert that the page tells people to look for is on the pages, and each code is an error's."""
    text = (DOCS / name).read_text()
    console = TOP / "service" / "holdfast_service" / "wings" / "console"
    pages = "\n".join(path.read_text() for path in sorted(console.rglob("*")) if path.suffix in {".py", ".html"})
    shown = {re.sub(r" \d+$", "", word) for word in re.findall(r"`([A-Z][a-z]\w* ?[^`(]*)`", text)}
    buttons = {word for word in shown if not hasattr(errors, word)} - {"SaveWarning"}
    assert {"Resume from step", "Acknowledge", "Died"} <= buttons
    rules = (TOP / "deploy" / "prometheus" / "alerts.yml").read_text()
    alerts = {word for word in buttons if f"- alert: {word}\n" in rules}
    assert "HoldfastDown" in alerts and [word for word in sorted(buttons - alerts) if word not in pages] == []
    codes = {error.code for error in vars(errors).values() if isinstance(error, type) and hasattr(error, "code")}
    listed = re.findall(r"`([a-z-]+)`", "\n".join(re.findall(r"^\| (`[a-z]+-[a-z-]+`[^|]*)", text, re.MULTILINE)))
    assert len(listed) > 6 and set(listed) <= codes
