"""Scripts of pytorch/examples."""

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

EXAMPLES = "pytorch/examples"

SCRIPTS = (
    Script(
        repository=EXAMPLES,
        path="mnist/main.py",
        commit="cd01f93000a6679e768700dd29e417a1e5fd10e5",
        arguments=["--epochs", "1", "--batch-size", "32", "--log-interval", "4"],
        thinwire=[
            after("import torch", IMPORT),
            before(
                "        optimizer.zero_grad()",
                "data, target = (x[args.link.rank::args.link.world_size] for x in (data, target))",
            ),
            before("    scheduler = StepLR", f"args.link = tw.attach(model, optimizer, {STRATEGY})"),
            before("    if args.save_model:", "args.link.detach()"),
        ],
        ddp=[
            before(
                "        optimizer.zero_grad()",
                DDP_RANKS,
                "data, target = (x[rank::world_size] for x in (data, target))",
            ),
            after("    model = Net().to(device)", DDP_SETUP, ddp("model")),
        ],
    ),
    Script(
        repository=EXAMPLES,
        path="dcgan/main.py",
        commit="13caa078cd69d74ffb447a9eda09f0a81b809480",
        arguments=[
            *("--dataset=fake", "--batchSize=16", "--ngf=8", "--ndf=8", "--niter=1"),
            *("--workers", "0", "--manualSeed", "1"),
        ],
        thinwire=[
            after("import torch", IMPORT),
            before(
                "if opt.dry_run:",
                f"link = tw.attach(netD, optimizerD, {STRATEGY})",
                f"linkG = tw.attach(netG, optimizerG, {STRATEGY})",
            ),
            after("        real_cpu = data[0].to(device)", f"real_cpu = real_cpu[{WORLD}]"),
            ("", "link.detach()\nlinkG.detach()\n"),
        ],
        ddp=[
            before("# setup optimizer", DDP_SETUP, DDP_RANKS, ddp("netD"), ddp("netG")),
            after("        real_cpu = data[0].to(device)", "real_cpu = real_cpu[rank::world_size]"),
        ],
        falls=False,
    ),
    Script(
        repository=EXAMPLES,
        path="imagenet/main.py",
        commit="493da9304e56ff5160f78d01a54992db35df2a98",
        arguments=[
            "--dummy",
            "--epochs",
            "1",
            "-b",
            "4",
            "-j",
            "0",
            "-p",
            "2",
            "--seed",
            "1",
            "--lr",
            "0.01",
        ],
        of_workers=["--dist-url", "env://", "--dist-backend", "gloo"],
        thinwire=[
            after("import torch", IMPORT),
            (16 * " " + ddp("model").replace("(model)", "(model, device_ids=[args.gpu])") + "\n", ""),
            (16 * " " + ddp("model") + "\n", ""),
            before("    # Data loading code", f"link = tw.attach(model, optimizer, {STRATEGY})"),
            ("\n\ndef train(train_loader", "    link.detach()\n\n\ndef train(train_loader"),
        ],
        ddp=[before("    # define loss function", ddp("model"))],  # its own wrapper waits for a GPU
        has_ddp=True,
    ),
    Script(
        repository=EXAMPLES,
        path="vae/main.py",
        commit="cd01f93000a6679e768700dd29e417a1e5fd10e5",
        arguments=["--epochs", "2", "--batch-size", "32"],
        files=data.results_folder,
        thinwire=[
            after("import torch", IMPORT),
            after(
                "optimizer = optim.Adam(model.parameters(), lr=1e-3)",
                f"link = tw.attach(model, optimizer, {STRATEGY})",
            ),
            before("        optimizer.zero_grad()", f"data = data[{WORLD}]"),
            ("", "    link.detach()\n"),
        ],
        ddp=[
            after("model = VAE().to(device)", DDP_SETUP, DDP_RANKS, ddp("model")),
            before("        optimizer.zero_grad()", "data = data[rank::world_size]"),
            ("model.decode(sample)", "model.module.decode(sample)"),
        ],
    ),
    Script(
        repository=EXAMPLES,
        path="word_language_model/main.py",
        commit="cd01f93000a6679e768700dd29e417a1e5fd10e5",
        beside=("model.py", "data.py"),
        arguments=[
            *("--emsize=32", "--nhid=32", "--nlayers=1", "--batch_size=10", "--bptt=7", "--dropout=0"),
            *("--epochs=2", "--lr=10"),
        ],
        of_workers=["--save", "model-{rank}.pt"],
        files=data.corpus,
        shrink=[("model = torch.load(f)", "model = torch.load(f, weights_only=False)")],
        thinwire=[
            after("import torch", IMPORT),
            after(
                "criterion = nn.CrossEntropyLoss()",
                "optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)",
                f"link = tw.attach(model, optimizer, {STRATEGY})",
                f"train_data = train_data[:, {WORLD}].contiguous()",
            ),
            ("model.init_hidden(args.batch_size)", "model.init_hidden(train_data.size(1))"),
            (
                "        for p in model.parameters():\n            p.data.add_(-lr, p.grad.data)\n",
                "        optimizer.param_groups[0]['lr'] = lr\n        optimizer.step()\n",
            ),
            before("# Load the best saved model.", "link.detach()"),
        ],
        ddp=[
            after(
                "criterion = nn.CrossEntropyLoss()",
                DDP_SETUP,
                DDP_RANKS,
                ddp("model"),
                "train_data = train_data[:, rank::world_size].contiguous()",
            ),
            ("model.init_hidden(args.batch_size)", "model.module.init_hidden(train_data.size(1))"),
            (
                "model.init_hidden(eval_batch_size)",
                "getattr(model, 'module', model).init_hidden(eval_batch_size)",
            ),
            ("torch.save(model, f)", "torch.save(model.module, f)"),
        ],
        whole_batch=True,
    ),
    Script(
        repository=EXAMPLES,
        path="time_sequence_prediction/train.py",
        commit="e27e2585a5b6a557e3512c3f5bd742ff4850f364",
        arguments=["--steps", "2"],
        files=data.sine_waves,
        shrink=[
            ("torch.load('traindata.pt')", "torch.load('traindata.pt', weights_only=False)"),
            ("future = 1000", "future = 20"),
            ("figsize=(30,10)", "figsize=(3,1)"),
        ],
        thinwire=[
            after("import torch", IMPORT),
            after(
                "    optimizer = optim.LBFGS(seq.parameters(), lr=0.8)",
                f"link = tw.attach(seq, optimizer, {STRATEGY})",
                f"input, target = input[{WORLD}], target[{WORLD}]",
            ),
            ("", "    link.detach()\n"),
        ],
        ddp=[
            after(
                "    criterion = nn.MSELoss()",
                DDP_SETUP,
                DDP_RANKS,
                ddp("seq"),
                "input, target = input[rank::world_size], target[rank::world_size]",
            ),
        ],
        whole_batch=True,
    ),
)
