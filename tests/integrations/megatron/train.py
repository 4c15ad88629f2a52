"""A script that trains a small GPT with Megatron, saves every two steps, and goes on from the newest save."""

from __future__ import annotations

from holdfast.integrations.megatron import close, configure, load_checkpoint, save_checkpoint
from tests.integrations.megatron import state, training
from tests.integrations.recording import Record

SAVE_EVERY = 2


def main() -> None:
    parser = training.parser()
    parser.add_argument("--steps", type=int, default=40)
    args = parser.parse_args()
    args.save = args.load = args.work / "root" / "run"
    record = Record()
    with training.parallel(args):
        configure(args=args, huggingface=training.huggingface(args))
        model, optimizer, scheduler, _ = made = training.build(args)
        iteration, operations = load_checkpoint(model, optimizer, scheduler)
        record.began(iteration)
        for number in range(iteration + 1, args.steps + 1):
            loss, rows = training.step(made, number)
            operations += 1000
            record.step(number, loss, rows)
            if number % SAVE_EVERY == 0:
                save_checkpoint(number, model, optimizer, scheduler, operations)
        record.ended(state.tensors(made), [operations, args.consumed_train_samples, scheduler.num_steps])
        close()


if __name__ == "__main__":
    main()
