// One call of an op's kernel: its tensors and its first failure.
#pragma once

#include <string>
#include <vector>

#include "cancellation.h"
#include "core.h"
#include "dtype.h"
#include "huge_pages.h"
#include "kinds.h"
#include "tf_api.h"

namespace tfring {

class ScopedStatus {
 public:
  ScopedStatus() : status_(tf.TF_NewStatus()) {}
  ~ScopedStatus() { tf.TF_DeleteStatus(status_); }
  ScopedStatus(const ScopedStatus&) = delete;
  ScopedStatus& operator=(const ScopedStatus&) = delete;
  TF_Status* get() { return status_; }
  bool ok() const { return tf.TF_GetCode(status_) == kTfOk; }

 private:
  TF_Status* status_;
};

// The last inputs of an op with a gradient: `before`, the `done` of the previous call, which is never read,
// and `of`, the `done` of the call whose gradient this is, or 0.
constexpr int kNumOrdering = 2;
// Number of consecutive calls that `done` distinguishes. It is a float32, because a tape ignores integers,
// and holds these numbers exactly.
constexpr uint64_t kNumNames = (1 << 24) - 1;

// The payload of a status that a broken ring sets. Its value is the ring's identity (ops.py).
constexpr char kPayload[] = "tfring";

// The attributes of a node.
struct Attributes {
  int64_t handle = 0;
  int64_t op = 0;
  int64_t root = 0;
  int64_t which = 0;  // for exchanges, the kind; for a receive, the number of the dtype
  int64_t compression = 0;
  bool has_gradient = false;
  std::string key;
};

// One call of a kernel. Collects tensors, remembers the first failure, and reports it at the end.
class Invocation {
 public:
  Invocation(const Attributes& attributes, TF_OpKernelContext* context)
      : attributes_(attributes), context_(context), cancellable_(context) {
    call_.name = attributes.key.c_str();
    call_.op = static_cast<int32_t>(attributes.op);
    call_.root = static_cast<int32_t>(attributes.root);
    call_.compression = static_cast<int32_t>(attributes.compression);
    call_.caller = TFRING_TENSORFLOW_OP;
    call_.sequence = &sequence_;
    if (!attributes.has_gradient) return;
    const TF_Tensor* of = input(tf.TF_NumInputs(context) - 1);
    if (ok()) call_.of = static_cast<int64_t>(*static_cast<const float*>(tf.TF_TensorData(of)));
  }
  ~Invocation() {
    for (TF_Tensor* tensor : held_) tf.TF_DeleteTensor(tensor);
    if (!status_.ok()) tf.TF_OpKernelContext_Failure(context_, status_.get());
  }
  Invocation(const Invocation&) = delete;
  Invocation& operator=(const Invocation&) = delete;

  bool ok() const { return status_.ok(); }
  // Excludes the last inputs, for the order of gradients.
  int num_inputs() const { return tf.TF_NumInputs(context_) - (attributes_.has_gradient ? kNumOrdering : 0); }
  // Calls a collective and returns the core's answer.
  int run(Kind kind, const tfring_tensor* tensors, int num_tensors, const int64_t* counts = nullptr,
          tfring_allocate allocate = nullptr, void* to = nullptr) {
    call_.kind = static_cast<int32_t>(kind);
    return tfring_run(attributes_.handle, &call_, tensors, num_tensors, counts, allocate, to, &error_);
  }
  // Ends a call. Its last output is its sequence number, to which its gradient refers.
  void finish(int code) {
    if (ok()) check(code);  // otherwise there was no memory
    if (!ok()) return;
    void* done = allocate(tf.TF_NumOutputs(context_) - 1, static_cast<TfDataType>(DType::kFloat32), {});
    if (ok()) *static_cast<float*>(done) = static_cast<float>((sequence_ - 1) % kNumNames + 1);
  }
  tfring_call& call() { return call_; }
  tfring_error* error() { return &error_; }

  // Holds the input until the end of the call. Returns null after a failure.
  TF_Tensor* input(int index) {
    TF_Tensor* tensor = nullptr;
    tf.TF_GetInput(context_, index, &tensor, status_.get());
    return hold(tensor);
  }

  // Reads the input `active`. If it is false, this rank contributes zeros.
  void read_active(int index) {
    const TF_Tensor* active = input(index);
    if (ok()) call_.inactive = *static_cast<const unsigned char*>(tf.TF_TensorData(active)) == 0;
  }

  std::vector<int64_t> input_dims(int index, TfDataType* dtype) {
    TF_Tensor* tensor = nullptr;
    tf.TF_GetInput(context_, index, &tensor, status_.get());
    std::vector<int64_t> dims;
    if (!ok()) return dims;
    for (int i = 0; i < tf.TF_NumDims(tensor); ++i) dims.push_back(tf.TF_Dim(tensor, i));
    *dtype = tf.TF_TensorType(tensor);
    tf.TF_DeleteTensor(tensor);
    return dims;
  }

  // Makes output `output` with the shape of input `index`, in that input's memory if no other op needs it.
  void in_place(int index, int output, tfring_tensor* tensor, std::vector<int64_t>* dims) {
    TfDataType dtype = 0;
    *dims = input_dims(index, &dtype);
    if (!ok()) return;
    int forwarded = -1;
    TF_Tensor* result =
        hold(tf.TF_ForwardInputOrAllocateOutput(context_, &index, 1, output, dims->data(),
                                                static_cast<int>(dims->size()), &forwarded, status_.get()));
    if (!ok()) return;
    const TF_Tensor* source = forwarded < 0 ? input(index) : result;
    if (!ok()) return;
    if (forwarded < 0) in_huge_pages(tf.TF_TensorData(result), tf.TF_TensorByteSize(result));
    *tensor = {tf.TF_TensorData(source), tf.TF_TensorData(result), dims->data(),
               static_cast<int32_t>(dims->size()), dtype};
  }

  void* allocate(int output, TfDataType dtype, const std::vector<int64_t>& dims) {
    size_t length =
        dtype == kTfString ? sizeof(TF_TString) : static_cast<size_t>(size_of(static_cast<DType>(dtype)));
    for (int64_t dim : dims) length *= static_cast<size_t>(dim);
    TF_Tensor* result = hold(tf.TF_AllocateOutput(context_, output, dtype, dims.data(),
                                                  static_cast<int>(dims.size()), length, status_.get()));
    if (!ok()) return nullptr;
    in_huge_pages(tf.TF_TensorData(result), length);
    return tf.TF_TensorData(result);
  }

  void fail(int code, const std::string& message) { tf.TF_SetStatus(status_.get(), code, message.c_str()); }

  // Turns the core's answer into a status.
  void check(int code) {
    if (code == TFRING_OK) return;
    fail(code_of(code), error_.message);
    if (error_.ring != 0) tf.TF_SetPayload(status_.get(), kPayload, std::to_string(error_.ring).c_str());
  }

  int64_t handle() const { return attributes_.handle; }
  TF_OpKernelContext* context() { return context_; }

 private:
  static int code_of(int code) {
    switch (code) {
      case TFRING_MISMATCH:
      case TFRING_INVALID:
        return kTfInvalidArgument;
      case TFRING_PEER_LOST:
        return kTfAborted;
      case TFRING_TIMEOUT:
        return kTfDeadlineExceeded;
      case TFRING_INTERRUPTED:  // Python raises KeyboardInterrupt once it runs again
        return kTfCancelled;
      default:
        return kTfInternal;
    }
  }

  TF_Tensor* hold(TF_Tensor* tensor) {
    if (tensor != nullptr) held_.push_back(tensor);
    return tensor;
  }

  const Attributes& attributes_;
  TF_OpKernelContext* context_;
  Cancellable cancellable_;
  ScopedStatus status_;
  tfring_call call_{};
  uint64_t sequence_ = 0;
  tfring_error error_{};
  std::vector<TF_Tensor*> held_;
};

// All tensors from input `first`, each with an output of its shape.
class InPlaceTensors {
 public:
  InPlaceTensors(Invocation* invocation, int first)
      : tensors_(static_cast<size_t>(invocation->num_inputs() - first)), dims_(tensors_.size()) {
    for (int i = 0; i < count() && invocation->ok(); ++i) {
      const size_t at = static_cast<size_t>(i);
      invocation->in_place(first + i, i, &tensors_[at], &dims_[at]);
    }
  }

  const tfring_tensor* data() const { return tensors_.data(); }
  int count() const { return static_cast<int>(tensors_.size()); }

 private:
  std::vector<tfring_tensor> tensors_;
  std::vector<std::vector<int64_t>> dims_;  // the tensors point to these
};

}  // namespace tfring
