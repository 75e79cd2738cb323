//! The guest images of this host, opened for VMs.

use vmfork_api::{ErrorBody, ErrorCode};
use vmfork_guest_image::{ImageFiles, Remedy as _, StoreError};

use super::Core;
use crate::error::chain;

/// The image's files, open.
pub fn open_image(core: &Core, name: &str) -> Result<ImageFiles, ErrorBody> {
    core.images.open(name).map_err(|error| ErrorBody {
        code: store_code(&error),
        message: format!("open image `{name}`"),
        cause: Some(chain(&error)),
        remedy: error.remedy(),
    })
}

/// The API's code for an error of the image store.
pub fn store_code(error: &StoreError) -> ErrorCode {
    match error {
        StoreError::NotFound { .. } => ErrorCode::NotFound,
        StoreError::BadName { .. } => ErrorCode::BadRequest,
        _ => ErrorCode::Host,
    }
}
