//! Images that are no VM's memory: caches in sparse files, and readers that are no userfaultfd
//! views.

mod common;
mod sparse_file;
