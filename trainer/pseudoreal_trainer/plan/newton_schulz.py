"""The orthogonalization of a matrix by Newton-Schulz iterations: its coefficients, operations and memory. Pure.

An iteration maps the singular values of a matrix X, [m, n] with m <= n, by a polynomial: X becomes
a X + (b G + c G G) X, with G = X X^T. Five iterations take singular values between 0.002 and 1 to between 0.68 and 1.21
(K. Jordan, Muon, 2024; the coefficients are chosen for speed, and have no fixed point at 1).
"""

ITERATIONS = 5
A, B, C = 3.4445, -4.7750, 2.0315
"""Coefficients of an iteration."""


def flops(rows: int, columns: int) -> int:
    """Return the floating-point operations of all iterations: of three products each."""
    short, long = sorted((rows, columns))
    return ITERATIONS * (2 * 2 * short * short * long + 2 * short**3)


def scratch_bytes(rows: int, columns: int, master: int, compute: int) -> int:
    """Return the bytes in which a matrix is orthogonalized: two matrices X, which take turns, G, and b G + c G G; and
    the matrix in the master dtype, if the iterations have another dtype. `master`, `compute`: bytes of an element of
    the master dtype and in the iterations."""
    whole, square = rows * columns, min(rows, columns) ** 2
    return (2 * whole + 2 * square) * compute + (whole * master if compute != master else 0)
