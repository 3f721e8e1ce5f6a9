// Outputs are allocated once the engine knows the numbers of rows.
#include "exchange_ops.h"

#include <cstring>

#include "invocation.h"

namespace tfring {
namespace {

constexpr int64_t kNoWorld = 0;  // a sum of this process's rows alone

// The tensors of an exchange, and the memory for their rows once the numbers are known.
struct Exchanged {
  Invocation* invocation;
  int world_size;
  int64_t* all_rows;  // the last output: [rank][tensor], and for a sum of rows one more row for this rank
  std::vector<tfring_tensor> tensors;
  std::vector<std::vector<int64_t>> dims;  // the tensors point to these
  int own = 0;                             // rows of numbers after those of the ranks

  int count() const { return static_cast<int>(tensors.size()); }

  // Takes the tensors from input `first`, and allocates the numbers of rows.
  bool take(int first) {
    world_size = invocation->handle() == kNoWorld ? 1 : tfring_world_size(invocation->handle());
    if (world_size < 0) {
      invocation->fail(kTfInvalidArgument, "this communicator is closed");
      return false;
    }
    const size_t num_tensors = static_cast<size_t>(invocation->num_inputs() - first);
    tensors.resize(num_tensors);
    dims.resize(num_tensors);
    for (size_t i = 0; i < num_tensors; ++i) {
      const TF_Tensor* tensor = invocation->input(first + static_cast<int>(i));
      if (!invocation->ok()) return false;
      for (int d = 0; d < tf.TF_NumDims(tensor); ++d) dims[i].push_back(tf.TF_Dim(tensor, d));
      tensors[i] = {tf.TF_TensorData(tensor), nullptr, dims[i].data(), static_cast<int32_t>(dims[i].size()),
                    tf.TF_TensorType(tensor)};
    }
    all_rows = static_cast<int64_t*>(
        invocation->allocate(count(), static_cast<TfDataType>(DType::kInt64), {world_size + own, count()}));
    return invocation->ok();
  }

  // Allocates outputs with this number of rows.
  bool allocate(const int64_t* rows, void** outputs) {
    std::memcpy(all_rows, rows, static_cast<size_t>(world_size + own) * tensors.size() * sizeof(int64_t));
    for (size_t i = 0; i < tensors.size(); ++i) {
      std::vector<int64_t> out = dims[i];
      if (out.empty()) out.push_back(0);
      out[0] = 0;
      for (int r = 0; r < world_size; ++r) out[0] += rows[static_cast<size_t>(r) * tensors.size() + i];
      void* memory = invocation->allocate(static_cast<int>(i), tensors[i].dtype, out);
      if (!invocation->ok()) return false;
      if (outputs != nullptr) outputs[i] = memory;
    }
    return true;
  }

  int run(Kind kind, const int64_t* counts = nullptr) {
    return invocation->run(kind, tensors.data(), count(), counts, allocate, this);
  }

  static void allocate(void* context, const int64_t* rows, int32_t, void** outputs, int32_t* placed) {
    if (static_cast<Exchanged*>(context)->allocate(rows, outputs)) *placed = 1;
  }
};

}  // namespace

void all_gather_rows(void* state, TF_OpKernelContext* context) {
  Invocation invocation(*static_cast<Attributes*>(state), context);
  Exchanged exchanged{&invocation, 0, nullptr, {}, {}, 0};
  if (exchanged.take(1)) invocation.finish(exchanged.run(Kind::kAllGather));  // after token
}

void all_reduce_rows(void* state, TF_OpKernelContext* context) {
  Invocation invocation(*static_cast<Attributes*>(state), context);
  invocation.read_active(1);  // after token
  Exchanged exchanged{&invocation, 0, nullptr, {}, {}, 1};
  if (!invocation.ok() || !exchanged.take(2)) return;
  const int code = invocation.handle() == kNoWorld
                       ? tfring_sum_rows(&invocation.call(), exchanged.tensors.data(), exchanged.count(),
                                         &Exchanged::allocate, &exchanged, invocation.error())
                       : exchanged.run(Kind::kAllReduceRows);
  if (invocation.ok()) invocation.check(code);  // otherwise there was no memory
}

void exchange_rows(void* state, TF_OpKernelContext* context) {
  const Attributes& attributes = *static_cast<Attributes*>(state);
  const Kind kind = static_cast<Kind>(attributes.which);
  Invocation invocation(attributes, context);
  const TF_Tensor* counts = invocation.input(1);  // after token: [rank][tensor]
  Exchanged exchanged{&invocation, 0, nullptr, {}, {}, 0};
  if (!invocation.ok() || !exchanged.take(2)) return;
  const auto* numbers = static_cast<const int64_t*>(tf.TF_TensorData(counts));
  const int size = exchanged.world_size;
  const int num_tensors = exchanged.count();
  const bool is_root = tfring_rank(invocation.handle()) == invocation.call().root;
  const bool counted = kind == Kind::kAllToAll || (kind == Kind::kScatter && is_root);
  if (tf.TF_NumDims(counts) != 2 || tf.TF_Dim(counts, 0) != size || tf.TF_Dim(counts, 1) != num_tensors) {
    return invocation.fail(kTfInvalidArgument, "`counts` must have one number per rank and tensor");
  }
  for (int t = 0; t < num_tensors && counted; ++t) {
    const std::vector<int64_t>& dims = exchanged.dims[static_cast<size_t>(t)];
    int64_t total = 0;
    bool legal = !dims.empty();
    for (int r = 0; r < size && legal; ++r) {
      const int64_t number = numbers[r * num_tensors + t];
      legal = number >= 0 && number <= dims[0] - total;
      total += number;
    }
    if (!legal || total != dims[0]) {
      return invocation.fail(kTfInvalidArgument, std::string("\"") + invocation.call().name +
                                                     "\": `counts` add up to " + std::to_string(total) +
                                                     ", not to the rows of tensor " + std::to_string(t));
    }
  }
  invocation.finish(exchanged.run(kind, kind == Kind::kGather ? nullptr : numbers));
  if (!invocation.ok() || kind != Kind::kGather || is_root) return;
  exchanged.allocate(std::vector<int64_t>(static_cast<size_t>(size * num_tensors)).data(), nullptr);
}

}  // namespace tfring
