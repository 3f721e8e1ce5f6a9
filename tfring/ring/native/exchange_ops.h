// The ops with output sizes that become known on the way.
#pragma once

#include "tf_api.h"

namespace tfring {

void all_gather_rows(void* state, TF_OpKernelContext* context);
// Inputs are values of tables, then their ids. Without a world (handle 0) it sums for this process only.
void all_reduce_rows(void* state, TF_OpKernelContext* context);
// Runs all_to_all, gather or scatter, by the attribute `which`.
void exchange_rows(void* state, TF_OpKernelContext* context);

}  // namespace tfring
