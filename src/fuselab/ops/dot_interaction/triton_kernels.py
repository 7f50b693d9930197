"""The dot interaction and its gradient in Triton.

A program owns SAMPLES samples. It reads their vectors [dense; embeddings] once, padded with zeros
to VECTORS x WIDTH (powers of two from 16 on, as a matrix instruction needs). All products of a
sample are one batched tl.dot that stays in registers; only those below the diagonal are stored. The
backward gathers the upstream gradients of the pairs into a symmetric matrix (each is read twice,
the second time from L1) and multiplies it with the vectors.

Rows are contiguous along their last dimension; the other strides count elements and may be 0.
``output``, ``grad_dense`` and ``grad_embeddings`` are contiguous.
"""

import triton
import triton.language as tl


@triton.jit
def load_vectors(
    dense, embeddings, sample, vector, column, mask, dense_stride, batch_stride, vector_stride
):
    """Load [SAMPLES, VECTORS, WIDTH]; vector 0 is the dense one. Zeros where not ``mask``."""
    first = tl.load(
        dense + sample * dense_stride + column + vector * 0, mask=mask & (vector == 0), other=0.0
    )
    others = tl.load(
        embeddings + sample * batch_stride + (vector - 1).to(tl.int64) * vector_stride + column,
        mask=mask & (vector > 0),
        other=0.0,
    )
    return tl.where(vector == 0, first, others)


@triton.jit(do_not_specialize=["batch", "vectors"])
def forward(
    dense,  # (batch, width)
    embeddings,  # (batch, vectors - 1, width)
    output,  # (batch, columns)
    batch,
    vectors,
    width,
    columns,  # width, the pairs, and zeros
    dense_stride,
    batch_stride,
    vector_stride,
    PRECISION: tl.constexpr,  # "ieee" or "tf32": the arithmetic of float32 products
    SAMPLES: tl.constexpr,
    VECTORS: tl.constexpr,
    WIDTH: tl.constexpr,
    EDGE: tl.constexpr,  # a power of two, at least as many columns as are padding; 0 for none
):
    """Write output[b] = dense[b], then the products below the diagonal row by row, then zeros."""
    sample = tl.program_id(0).to(tl.int64) * SAMPLES + tl.arange(0, SAMPLES)[:, None, None]
    vector = tl.arange(0, VECTORS)[None, :, None]
    column = tl.arange(0, WIDTH)[None, None, :]
    mask = (sample < batch) & (vector < vectors) & (column < width)
    value = load_vectors(
        dense, embeddings, sample, vector, column, mask, dense_stride, batch_stride, vector_stride
    )
    products = tl.dot(value, tl.permute(value, (0, 2, 1)), input_precision=PRECISION)
    other = tl.arange(0, VECTORS)[None, None, :]
    tl.store(
        output + sample * columns + width + vector * (vector - 1) // 2 + other,
        products.to(output.dtype.element_ty),
        mask=(sample < batch) & (vector < vectors) & (other < vector),
    )
    row = output + sample * columns + vector * 0
    tl.store(row + column, value, mask=mask & (vector == 0))
    if EDGE:
        last = tl.program_id(0).to(tl.int64) * SAMPLES + tl.arange(0, SAMPLES)[:, None]
        place = width + vectors * (vectors - 1) // 2 + tl.arange(0, EDGE)[None, :]
        zeros = tl.zeros([SAMPLES, EDGE], output.dtype.element_ty)
        mask = (last < batch) & (place < columns)
        tl.store(output + last * columns + place, zeros, mask=mask)


@triton.jit(do_not_specialize=["batch", "vectors"])
def backward(
    grad_output,  # (batch, columns)
    dense,  # (batch, width)
    embeddings,  # (batch, vectors - 1, width)
    grad_dense,  # (batch, width), or None
    grad_embeddings,  # (batch, vectors - 1, width), or None
    batch,
    vectors,
    width,
    grad_stride,
    dense_stride,
    batch_stride,
    vector_stride,
    PRECISION: tl.constexpr,
    SAMPLES: tl.constexpr,
    VECTORS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Write (G + Gᵀ) Z for every sample, plus the dense vector's own upstream gradient."""
    sample = tl.program_id(0).to(tl.int64) * SAMPLES + tl.arange(0, SAMPLES)[:, None, None]
    vector = tl.arange(0, VECTORS)[None, :, None]
    column = tl.arange(0, WIDTH)[None, None, :]
    mask = (sample < batch) & (vector < vectors) & (column < width)
    value = load_vectors(
        dense, embeddings, sample, vector, column, mask, dense_stride, batch_stride, vector_stride
    )
    other = tl.arange(0, VECTORS)[None, None, :]
    high = tl.maximum(vector, other)
    place = width + high * (high - 1) // 2 + tl.minimum(vector, other)
    pairs = tl.load(
        grad_output + sample * grad_stride + place,
        mask=(sample < batch) & (high < vectors) & (vector != other),
        other=0.0,
    )
    total = tl.dot(pairs, value, input_precision=PRECISION)
    # As in eager's G Z, an infinity or NaN in Z makes its column NaN: G has zeros to multiply it.
    total += tl.sum(value.to(total.dtype) * 0.0, axis=1, keep_dims=True)
    own = tl.load(
        grad_output + sample * grad_stride + column + vector * 0,
        mask=mask & (vector == 0),
        other=0.0,
    )
    total = (total + own.to(total.dtype)).to(grad_output.dtype.element_ty)
    if grad_dense is not None:
        tl.store(
            grad_dense + sample * width + column + vector * 0, total, mask=mask & (vector == 0)
        )
    if grad_embeddings is not None:
        tl.store(
            grad_embeddings + (sample * (vectors - 1) + vector - 1) * width + column,
            total,
            mask=mask & (vector > 0),
        )
