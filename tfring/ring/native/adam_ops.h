// Adam's update as TensorFlow ops.
#pragma once

#include "tf_api.h"

namespace tfring {

// Updates momentum, velocity and weight by a gradient. `token` is the weight, which orders this with its
// assignments.
void adam(void* state, TF_OpKernelContext* context);

// Updates like `adam`, by a gradient that has only some of the weight's rows.
void adam_rows(void* state, TF_OpKernelContext* context);

}  // namespace tfring
