// Element-wise arithmetic, with the widest instructions of the processor.
//
// All instructions give the same bits: 16-bit floats are computed in float32 and rounded to nearest even,
// subnormals are kept, products are not fused with sums, and a NaN in a result is always the same one
// (NumPy's np.nan). So ranks on different machines that compute the same sum agree.
#pragma once

#include <cstdint>

#include "dtype.h"

namespace tfring {

// Computes out[i] = a[i] op b[i]. `out` may be `a`, but must not overlap otherwise. No alignment is needed.
void reduce(DType dtype, Op op, void* out, const void* a, const void* b, int64_t count);

// Computes out[i] = parts[0][i] op parts[1][i] op ..., in this order. 16-bit floats are rounded once, at the
// end. `out` may be parts[0]. A single part is copied.
void reduce_many(DType dtype, Op op, void* out, const void* const* parts, int num_parts, int64_t count);

// Adds row i, of `width` elements, to the row at to[positions[i]]. If positions[i] is *begun, there is no row
// yet, and *begun is incremented. The sums of 16-bit floats are float32.
void add_rows(DType dtype, void* const* to, const int32_t* positions, const void* rows, int64_t count,
              int64_t width, int64_t* begun);

// Convert between float32 and a 16-bit float.
void widen(DType dtype, float* out, const void* in, int64_t count);
void narrow(DType dtype, void* out, const float* in, int64_t count);

// Computes Adam's update of weights like Keras, with each operation rounded by itself; see tfring_adam. Uses
// the caller's floating-point mode, which is that of TensorFlow's other operations.
void adam(DType dtype, const void* scalars, const void* gradients, const void* const* from, void* const* to,
          int64_t count);

// One set of instructions. Each has its own file.
struct Kernels {
  const char* name;
  bool (*supported)();
  void (*reduce)(DType, Op, void*, const void*, const void*, int64_t);
  void (*widen)(DType, float*, const void*, int64_t);
  void (*narrow)(DType, void*, const float*, int64_t);
  void (*adam)(DType, const void*, const void*, const void* const*, void* const*, int64_t);
};
extern const Kernels kPlain;  // instructions of any processor of this kind
#if defined(__x86_64__)
extern const Kernels kAvx2;
extern const Kernels kAvx512;
#endif

}  // namespace tfring
