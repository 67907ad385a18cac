"""Scripts of other repositories."""

from __future__ import annotations

from benchmarks.real_scripts import data
from benchmarks.real_scripts.script import (
    DDP_RANKS,
    DDP_SETUP,
    IMPORT,
    STRATEGY,
    WORLD,
    Script,
    after,
    before,
    ddp,
)

TUTORIAL = "yunjey/pytorch-tutorial"
IN_TUTORIAL = "tutorials/02-intermediate"

_NANOGPT = {
    "dataset": "tiny", "device": "cpu", "backend": "gloo", "compile": False, "dtype": "float32",
    "max_iters": 20, "eval_interval": 10, "eval_iters": 2, "n_layer": 2, "n_head": 2, "n_embd": 64,
    "block_size": 32, "batch_size": 8, "gradient_accumulation_steps": 4, "lr_decay_iters": 20,
    "warmup_iters": 2, "learning_rate": 1e-2, "wandb_log": False,
}  # fmt: skip

_PICTURES = f"images, labels = images[{WORLD}], labels[{WORLD}]"
_DDP_PICTURES = "images, labels = images[rank::world_size], labels[rank::world_size]"
_ADAM = "optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)"

SCRIPTS = (
    Script(
        repository="karpathy/nanoGPT",
        path="train.py",
        commit="e2221318e607eb5ee0669d6b7641af25a2111545",
        beside=("model.py", "configurator.py"),
        arguments=[f"--{key}={value}" for key, value in _NANOGPT.items()],
        files=data.token_files,
        shrink=[
            ("    device = f'cuda:{ddp_local_rank}'\n    torch.cuda.set_device(device)\n", ""),
            ("DDP(model, device_ids=[ddp_local_rank])", "DDP(model)"),
        ],
        thinwire=[
            after("import torch", IMPORT),
            ("if ddp:\n    model = DDP(model)\n", f"link = tw.attach(model, optimizer, {STRATEGY})\n"),
            ("raw_model = model.module if ddp else model", "raw_model = model"),
            (
                "        scaler.scale(loss).backward()\n",
                "        last = micro_step == gradient_accumulation_steps - 1\n"
                "        with nullcontext() if last else link.no_sync():\n"
                "            scaler.scale(loss).backward()\n",
            ),
            before("if ddp:\n    destroy_process_group()", "link.detach()"),
        ],
        ddp=(),
        has_ddp=True,
    ),
    Script(
        repository="karpathy/ng-video-lecture",
        path="gpt.py",
        commit="0ceb0055aad7a7b255730be650dd667d6daffd9f",
        files=data.input_text,
        shrink=[
            ("batch_size = 64", "batch_size = 16"),
            ("block_size = 256", "block_size = 32"),
            ("max_iters = 5000", "max_iters = 20"),
            ("eval_interval = 500", "eval_interval = 10"),
            ("eval_iters = 200", "eval_iters = 2"),
            (
                "n_embd = 384\nn_head = 6\nn_layer = 6\ndropout = 0.2",
                "n_embd = 64\nn_head = 2\nn_layer = 2\ndropout = 0",
            ),
            ("max_new_tokens=500", "max_new_tokens=10"),
        ],
        thinwire=[
            after("import torch", IMPORT),
            after(
                "optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)",
                f"link = tw.attach(model, optimizer, {STRATEGY})",
            ),
            after(
                "    xb, yb = get_batch('train')",
                "xb, yb = (batch.chunk(link.world_size)[link.rank] for batch in (xb, yb))",
            ),
            ("", "link.detach()\n"),
        ],
        ddp=[
            after("m = model.to(device)", DDP_SETUP, DDP_RANKS, ddp("model")),
            after(
                "    xb, yb = get_batch('train')",
                "xb, yb = (batch.chunk(world_size)[rank] for batch in (xb, yb))",
            ),
        ],
        whole_batch=True,
    ),
    Script(
        repository=TUTORIAL,
        path=f"{IN_TUTORIAL}/bidirectional_recurrent_neural_network/main.py",
        commit="78c6afe681c4ff5095ef13662c02a7e369b1bcbd",
        shrink=[("batch_size = 100", "batch_size = 32"), ("hidden_size = 128", "hidden_size = 32")],
        thinwire=[
            after("import torch ", IMPORT),
            after(_ADAM, f"link = tw.attach(model, optimizer, {STRATEGY})"),
            after("        labels = labels.to(device)", _PICTURES),
            ("", "link.detach()\n"),
        ],
        ddp=[
            after("criterion = nn.CrossEntropyLoss()", DDP_SETUP, DDP_RANKS, ddp("model")),
            after("        labels = labels.to(device)", _DDP_PICTURES),
        ],
        whole_batch=True,
    ),
    Script(
        repository=TUTORIAL,
        path=f"{IN_TUTORIAL}/deep_residual_network/main.py",
        commit="78c6afe681c4ff5095ef13662c02a7e369b1bcbd",
        shrink=[("num_epochs = 80", "num_epochs = 1"), ("*batch_size=100", "batch_size=16")],
        thinwire=[
            after("import torch", IMPORT),
            after(_ADAM, f"link = tw.attach(model, optimizer, {STRATEGY})"),
            after("        labels = labels.to(device)", _PICTURES),
            ("", "link.detach()\n"),
        ],
        ddp=[
            after("criterion = nn.CrossEntropyLoss()", DDP_SETUP, DDP_RANKS, ddp("model")),
            after("        labels = labels.to(device)", _DDP_PICTURES),
        ],
    ),
    Script(
        repository="eriklindernoren/PyTorch-GAN",
        path="implementations/wgan_gp/wgan_gp.py",
        commit="e0a8f3cd5e497805bcaab4c6111c6305afd75a15",
        arguments=["--n_epochs", "1", "--batch_size", "16"],
        thinwire=[
            after("import torch", IMPORT),
            before(
                "Tensor = torch.cuda",
                f"link = tw.attach(discriminator, optimizer_D, {STRATEGY})",
                f"link_G = tw.attach(generator, optimizer_G, {STRATEGY})",
            ),
            before("        # Configure input", f"imgs = imgs[{WORLD}]"),
            ("", "link.detach()\nlink_G.detach()\n"),
        ],
        ddp=[
            before("# Optimizers", DDP_SETUP, DDP_RANKS, ddp("discriminator"), ddp("generator")),
            before("        # Configure input", "imgs = imgs[rank::world_size]"),
        ],
        falls=False,
    ),
)
