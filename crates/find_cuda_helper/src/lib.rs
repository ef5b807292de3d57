//! `cust` and `cust_raw` call this from their build scripts to add `-lcuda`. Here `cuda_driver` defines those
//! symbols and fills them from libcuda.so.1 at run time, so there is nothing to find and nothing to link.

pub fn include_cuda() {}
