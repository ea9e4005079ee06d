"""mnist_fast: its network and its dropout do what the example's do, and its loop takes the steps that it should."""

import pytest
import torch
import torch.nn.functional as F

from ddp_helpers.rank.scripts import mnist_fast
from ddp_helpers.rank.scripts.mnist_ddp import Net
from ddp_helpers.rank.scripts.mnist_fast import Dropout, FastNet, measure_batch


def nets(p=0.0):
    """The fast network and the example's, with the same weights; without dropout, whose numbers differ."""
    torch.manual_seed(1)
    mine, theirs = FastNet().to(memory_format=torch.channels_last), Net()
    theirs.load_state_dict(mine.state_dict())
    for net in (mine, theirs):
        net.dropout1.p = net.dropout2.p = p
    return mine, theirs


def gradients(net, images, labels):
    """The gradient of every parameter."""
    net.zero_grad()
    F.cross_entropy(net(images), labels).backward()
    return {name: p.grad.clone() for name, p in net.named_parameters()}


def test_the_fast_net_is_the_example_with_less_work():
    mine, theirs = nets()
    images, labels = torch.randn(32, 1, 28, 28), torch.randint(10, (32,))
    torch.testing.assert_close(mine(images), theirs(images), rtol=1e-5, atol=1e-5)
    fast, slow = gradients(mine, images, labels), gradients(theirs, images, labels)
    for name in slow:
        torch.testing.assert_close(fast[name], slow[name], rtol=1e-4, atol=1e-6)
    plain = FastNet()  # without channels last: equal to the bit
    plain.load_state_dict(theirs.state_dict())
    assert torch.equal(plain.eval()(images), theirs.eval()(images))
    mine.conv2.bias.data[0] += 1e-2
    with pytest.raises(AssertionError):
        torch.testing.assert_close(mine(images), theirs(images), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("p", [0.25, 0.5])
@pytest.mark.parametrize("shape", [(64, 64, 12, 12), (7, 3, 5, 5)])
def test_dropout_drops_its_share_scales_the_rest_and_its_gradient_alike(p, shape):
    torch.manual_seed(1)
    x = torch.ones(shape).to(memory_format=torch.channels_last).requires_grad_()
    drop = Dropout(p)
    y = drop(x)
    assert y.unique().tolist() == pytest.approx([0, 1 / (1 - p)])
    assert abs((y == 0).double().mean() - p) < 5 * (p * (1 - p) / x.numel()) ** 0.5
    y.sum().backward()
    assert torch.equal(x.grad, y) and not torch.equal(y, drop(x)), "each call draws anew"
    assert y.stride() == x.stride()
    assert torch.equal(drop.eval()(x), x)


def test_each_place_is_dropped_as_often_as_any():
    torch.manual_seed(1)
    drop, x = Dropout(0.25), torch.ones(1, 16)
    share = torch.stack([drop(x) == 0 for _ in range(8000)]).double().mean(dim=(0, 1))
    assert (share - 0.25).abs().max() < 5 * (0.25 * 0.75 / 8000) ** 0.5, "no byte of a random word is special"


def test_the_same_seed_drops_the_same():
    drop, x, seen = Dropout(0.5), torch.ones(100), []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        seen.append(drop(x))
    assert torch.equal(seen[0], seen[1]) and not torch.equal(seen[0], seen[2])


def test_it_takes_a_batch_larger_than_the_set_makes_one_step_of_a_dry_run_and_saves(tmp_path, digits, monkeypatch):
    steps = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        mnist_fast, "measure_batch", lambda *args: steps.append(args[0].training) or measure_batch(*args)
    )
    for flags in (["--batch-size", "1000000"], ["--dry-run", "--save-model"]):
        monkeypatch.setattr("sys.argv", ["mnist_fast.py", "--data", str(digits), "--epochs", "1", "--no-cuda", *flags])
        mnist_fast.main()
        assert sum(steps) == 1, "steps of training"
        steps.clear()
    assert torch.load("mnist_cnn.pt", weights_only=True).keys() == FastNet().state_dict().keys()


def test_each_step_takes_the_gradients_of_its_own_batch_alone(digits, tmp_path, monkeypatch):
    """Computed a second time, from the batch, as the optimizer steps; without dropout, whose numbers would differ."""
    batches, far = [], []
    monkeypatch.setattr(Dropout, "forward", lambda _, x: x)
    monkeypatch.setattr(mnist_fast, "measure_batch", lambda *args: batches.append(args) or measure_batch(*args))
    step = torch.optim.Adadelta.step

    def compared(optimizer, *args):
        net, images, labels, _ = batches[-1]
        own = torch.autograd.grad(F.cross_entropy(net(images), labels), [*net.parameters()])
        far.append(max(float((p.grad - g).abs().max()) for p, g in zip(net.parameters(), own, strict=True)))
        return step(optimizer, *args)

    monkeypatch.setattr(torch.optim.Adadelta, "step", compared)
    flags = ["--data", str(digits), "--epochs", "1", "--batch-size", "128", "--no-cuda"]
    monkeypatch.setattr("sys.argv", ["mnist_fast.py", *flags])
    mnist_fast.main()
    assert len(far) == 4 and max(far) < 1e-6, far
