//! The guest images of this host, opened for VMs.

use vmfork_guest_image::ImageFiles;

use super::Core;
use crate::error::ImageError;

/// The image's files, open.
///
/// # Errors
/// There is no such image, or it can't be read.
pub fn open_image(core: &Core, name: &str) -> Result<ImageFiles, ImageError> {
    core.images.open(name).map_err(|error| ImageError { name: name.to_owned(), error })
}
