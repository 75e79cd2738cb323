//! What one disk has written since its last freeze.

mod files;
mod folder;
mod map;
mod stored;

pub use files::{LayerError, LayerFiles, Partly};
pub(crate) use folder::{Keep, LayerFolder, remove_layer, write_atomically};
pub(crate) use map::CHUNK_PAGES;
pub use map::{LayerMap, MapFlaw, PageState};
pub(crate) use stored::StoredLayer;
