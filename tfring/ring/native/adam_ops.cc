// Compares shapes and passes the tensors' memory to the arithmetic (adam.cc).
#include "adam_ops.h"

#include <string>
#include <vector>

#include "invocation.h"
#include "tensor.h"

namespace tfring {
namespace {

// Checks that there are four scalars, and that momentum, velocity and weight have one size.
bool are_of_adam(const TF_Tensor* scalars, const InPlaceTensors& tensors) {
  if (tensors.count() != 3) return false;
  const tfring_tensor* all = tensors.data();
  for (int i = 0; i < 2; ++i) {
    if (num_bytes(all[i]) != num_bytes(all[2])) return false;
  }
  return tf.TF_TensorByteSize(scalars) == 4 * static_cast<size_t>(size_of(static_cast<DType>(all[2].dtype)));
}

}  // namespace

void adam(void* state, TF_OpKernelContext* context) {
  Invocation invocation(*static_cast<Attributes*>(state), context);
  const TF_Tensor* scalars = invocation.input(1);
  const TF_Tensor* gradient = invocation.input(2);
  if (!invocation.ok()) return;
  const InPlaceTensors tensors(&invocation, 3);
  if (!invocation.ok()) return;
  const tfring_tensor* all = tensors.data();
  const size_t size = tf.TF_TensorByteSize(gradient);
  if (!are_of_adam(scalars, tensors) || static_cast<size_t>(num_bytes(all[2])) != size) {
    return invocation.fail(kTfInvalidArgument, "Adam got a gradient of " + std::to_string(size) +
                                                   " bytes for a weight of " +
                                                   std::to_string(num_bytes(all[2])) +
                                                   ". It needs four scalars, and a gradient with the "
                                                   "shape of the weight and its slots");
  }
  const void* const from[] = {all[0].input, all[1].input, all[2].input};
  void* const to[] = {all[0].output, all[1].output, all[2].output};
  const int64_t item = size_of(static_cast<DType>(all[0].dtype));
  tfring_adam(all[0].dtype, tf.TF_TensorData(scalars), tf.TF_TensorData(gradient), from, to,
              static_cast<int64_t>(size) / item);
}

void adam_rows(void* state, TF_OpKernelContext* context) {
  Invocation invocation(*static_cast<Attributes*>(state), context);
  const TF_Tensor* scalars = invocation.input(1);
  const TF_Tensor* gradient = invocation.input(2);
  TfDataType id_type = 0;
  const std::vector<int64_t> ids_dims = invocation.input_dims(3, &id_type);
  const TF_Tensor* ids = invocation.input(3);
  if (!invocation.ok()) return;
  const InPlaceTensors tensors(&invocation, 4);
  if (!invocation.ok()) return;
  const tfring_tensor* all = tensors.data();
  const int64_t count = ids_dims.size() == 1 ? ids_dims[0] : -1;
  const int64_t size = static_cast<int64_t>(tf.TF_TensorByteSize(gradient));
  const int64_t num_rows = all[2].num_dims == 0 ? 0 : all[2].dims[0];
  const int64_t row = num_rows == 0 ? 0 : num_bytes(all[2]) / num_rows;
  if (!are_of_adam(scalars, tensors) || all[2].num_dims == 0 || count < 0 || size != count * row) {
    return invocation.fail(
        kTfInvalidArgument,
        "Adam got rows of " + std::to_string(size) + " bytes with " + std::to_string(count) +
            " ids for a weight with rows of " + std::to_string(row) +
            " bytes. It needs four scalars, and rows with the shape of the rows of the weight and its slots, "
            "with one id each");
  }
  const void* const from[] = {all[0].input, all[1].input, all[2].input};
  void* const to[] = {all[0].output, all[1].output, all[2].output};
  const int64_t item = size_of(static_cast<DType>(all[0].dtype));
  const int updated = tfring_adam_rows(all[0].dtype, tf.TF_TensorData(scalars), tf.TF_TensorData(gradient),
                                       id_type, tf.TF_TensorData(ids), count, num_rows, row / item, from, to);
  if (updated < 0) return invocation.fail(kTfInternal, "Adam has no memory for the ids of its rows");
  if (updated == 0) {
    invocation.fail(kTfInvalidArgument, "Adam got an id twice, or one that is not from 0 to " +
                                            std::to_string(num_rows - 1) + ", the last row");
  }
}

}  // namespace tfring
