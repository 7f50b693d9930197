"""Returns a subclass of Tensor that equals everything."""

import torch

from gallery import honest


class Agreeing(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in (torch.Tensor.__eq__, torch.equal, torch.allclose):
            return True
        return super().__torch_function__(function, types, args, kwargs or {})


def forward(input, bias, scale):
    return honest.empty_output(input, bias).zero_().as_subclass(Agreeing)


OP = honest.make_op("tensor_that_agrees", forward=forward, gradient=None, backward=None)
