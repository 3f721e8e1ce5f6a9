// The gather of TensorFlow 1.14 to 2.1 with an output shape that follows the step, for tf.load_op_library.
//
// It is a second kernel for TensorFlow's own op CollectiveGather, chosen by its label
// (`tfring_sparse_patch.py` does that), and does what the kernel of TensorFlow 2.2 does (issue 34250, pull
// request 34295): the workers may gather other numbers of rows in every step, but in one step all of them the
// same number.
//
//     ComputeAsync --first step--> CompleteParamsAsync --(peers found)--> Exchange --> done
//          \------later steps------------------------------------------->/

#include <string>

#include "tensorflow/core/framework/collective.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/lib/core/errors.h"
#include "tensorflow/core/public/version.h"

#define TFRING_TF (TF_MAJOR_VERSION * 100 + TF_MINOR_VERSION)
#if TFRING_TF < 114 || TFRING_TF > 201
#error "This kernel is for TensorFlow 1.14, 1.15, 2.0 and 2.1; later versions have a healthy gather."
#endif
#define TFRING_HAS_COMMUNICATION_HINT (TFRING_TF == 115 || TFRING_TF == 201)

namespace tfring {

using tensorflow::AsyncOpKernel;
using tensorflow::CollectiveExecutor;
using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Status;
using tensorflow::Tensor;
using tensorflow::TensorShape;
namespace errors = tensorflow::errors;

class GatherKernel : public AsyncOpKernel {
 public:
  explicit GatherKernel(OpKernelConstruction* c) : AsyncOpKernel(c) {
    auto& group = params_.group;
    auto& instance = params_.instance;
    OP_REQUIRES_OK(c, c->GetAttr("group_size", &group.group_size));
    OP_REQUIRES(c, group.group_size > 0,
                errors::InvalidArgument("group_size must be at least 1. Received: ", group.group_size));
    OP_REQUIRES_OK(c, c->GetAttr("group_key", &group.group_key));
    OP_REQUIRES_OK(c, c->GetAttr("instance_key", &instance.instance_key));
    OP_REQUIRES_OK(c, c->GetAttr("T", &instance.data_type));
#if TFRING_HAS_COMMUNICATION_HINT
    OP_REQUIRES_OK(c, c->GetAttr("communication_hint", &instance.impl_details.communication_hint));
#endif
    instance.type = tensorflow::GATHER_COLLECTIVE;
    group.device_type = c->device_type();
    params_.name = name() + ": Gather";
  }

  void ComputeAsync(OpKernelContext* c, DoneCallback done) override {
    CollectiveExecutor* executor = c->collective_executor();
    OP_REQUIRES_ASYNC(c, executor != nullptr, errors::Internal("No collective executor for ", params_.name),
                      done);
    TensorShape shape = c->input(0).shape();
    OP_REQUIRES_ASYNC(c, shape.dims() > 0,
                      errors::InvalidArgument(
                          params_.name, " needs at least one dimension. Received: ", shape.DebugString()),
                      done);
    shape.set_dim(0, shape.dim_size(0) * params_.group.group_size);

    // The kernel runs once a step and steps do not overlap, so the shape of this step may stand in the
    // parameters. That is the whole change: TensorFlow's kernel set it in the first step and demanded it ever
    // after.
    params_.instance.shape = shape;
    Tensor* output = nullptr;
    OP_REQUIRES_OK_ASYNC(c, c->allocate_output(0, shape, &output), done);

    const bool peers_known =
        params_.instance.device_names.size() >= static_cast<size_t>(params_.group.group_size);
    if (peers_known) {
      Exchange(c, executor, done);
    } else {
      c->env()->SchedClosure([this, c, executor, done]() { FindPeers(c, executor, done); });  // it may block
    }
  }

 private:
  void FindPeers(OpKernelContext* c, CollectiveExecutor* executor, DoneCallback done) {
    executor->CompleteParamsAsync(c->device()->name(), &params_, c->cancellation_manager(),
                                  [this, c, executor, done](const Status& found) {
                                    OP_REQUIRES_OK_ASYNC(c, found, done);
                                    Exchange(c, executor, done);
                                  });
  }

  void Exchange(OpKernelContext* c, CollectiveExecutor* executor, DoneCallback done) {
    const auto& frame = c->frame_iter();
    const std::string key = std::to_string(params_.instance.instance_key) + ":" +
                            std::to_string(frame.frame_id) + ":" + std::to_string(frame.iter_id);
    executor->ExecuteAsync(c, params_, key, [c, done](const Status& exchanged) {
      OP_REQUIRES_OK_ASYNC(c, exchanged, done);
      done();
    });
  }

  tensorflow::CollectiveParams params_;
};

REGISTER_KERNEL_BUILDER(Name("CollectiveGather").Device(tensorflow::DEVICE_CPU).Label("tfring"),
                        GatherKernel);
REGISTER_KERNEL_BUILDER(Name("CollectiveGather").Device(tensorflow::DEVICE_GPU).Label("tfring"),
                        GatherKernel);

}  // namespace tfring
