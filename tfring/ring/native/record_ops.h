// Records of TFRecord files as TensorFlow ops: where they are, and those at given places.
#pragma once

#include "tf_api.h"

namespace tfring {

// Finds all records of a file: where each begins, its length, the checksum of its data, which is not read.
void index_records(void* state, TF_OpKernelContext* context);

// Reads records of files by their places, and checks them.
void read_records(void* state, TF_OpKernelContext* context);

}  // namespace tfring
