//! For every page of an image, its source: a persistent tree.
//!
//! ```text
//!   root ── Inner[16] ──┬── Uniform(Zero)          32 MiB in one slot
//!                       ├── Inner[16] ──┬── Uniform(Image 7)     a block in one slot
//!                       │               └── Mixed               a block of several sources
//!                       └── the same Inner that the table of image 7 has
//! ```
//!
//! The tree is over blocks of [`BLOCK_PAGES`](crate::BLOCK_PAGES). A block or any subtree of one
//! source is one slot of 16 bytes. That form is kept always, so that equal tables have equal trees.
//! A mixed block is packed (see [`MixedBlock`]): 136 bytes with two sources, 2 KiB with 192.
//!
//! Cloning a table is O(1). [`PageTable::derive`] copies the blocks that change and the way to
//! them. It shares all else with the table it came from, which stays as it was. How many pages
//! each image owns is carried along, so that [`PageTable::owners`] costs nothing.
//!
//! As bytes it is a list of [`PageTable::runs`], from which [`PageTable::uniform`] and one `derive`
//! make the table again. [`wire`](crate::wire) is the form for other hosts. For snapshots on disk
//! the store has a format of its own.

mod edit;
mod node;
mod owners;
mod packed;
mod size;
mod walk;

use std::sync::Arc;

pub use owners::Owners;
pub use packed::MixedBlock;
pub use size::TableSize;
pub use walk::Runs;

use self::node::{Extent, Node, Shape};
use crate::{BlockIdx, ImageId, PAGES_MAX, PageIdx, PageRange, Source};

/// A change that does not fit a table.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    #[error("pages {range} are not all in a table of {pages} pages")]
    OutOfBounds { range: PageRange, pages: u64 },
}

/// For every page of an image, its [`Source`]. Immutable; see the module for how it is built.
#[derive(Clone)]
pub struct PageTable {
    root: Node,
    shape: Shape,
    owners: Arc<Owners>,
}

/// What a table says of one block.
#[derive(Debug, Clone, Copy)]
pub enum BlockView<'a> {
    /// All its pages have this source.
    Uniform(Source),
    /// They have at least two sources.
    Mixed(&'a MixedBlock),
}

impl PageTable {
    /// A table of `pages` pages, all of one source.
    ///
    /// # Panics
    /// If `pages` is more than [`PAGES_MAX`].
    pub fn uniform(pages: u64, source: Source) -> Self {
        assert!(pages <= PAGES_MAX, "{pages} pages");
        let mut owners = Owners::default();
        owners.add(source, pages);
        Self {
            root: Node::Uniform(source),
            shape: Shape::for_pages(pages),
            owners: Arc::new(owners),
        }
    }

    /// This table with `changes` made to it, the later ones over the earlier. Takes time and
    /// memory for the blocks in which something changes; quickest if the changes come in
    /// ascending order, as a page map is read.
    ///
    /// # Errors
    /// If a change lies (partly) beyond the table.
    pub fn derive(
        &self,
        changes: impl IntoIterator<Item = (PageRange, Source)>,
    ) -> Result<Self, TableError> {
        let mut editor = edit::Editor::new(self);
        for (range, source) in changes {
            editor.set(range, source)?;
        }
        Ok(editor.finish())
    }

    /// How many pages the image has.
    pub fn pages(&self) -> u64 {
        self.shape.pages
    }

    /// All pages.
    pub fn range(&self) -> PageRange {
        PageRange::first(self.shape.pages)
    }

    /// The source of `page`, or `None` if the image has no such page.
    pub fn get(&self, page: PageIdx) -> Option<Source> {
        if page.0 >= self.shape.pages {
            return None;
        }
        Some(match self.find(page.block()).0 {
            BlockView::Uniform(source) => source,
            BlockView::Mixed(mixed) => mixed.source(page.index_in_block()),
        })
    }

    /// The source of `page`.
    ///
    /// # Panics
    /// If the image has no such page; [`PageTable::get`] does not.
    pub fn lookup(&self, page: PageIdx) -> Source {
        self.get(page)
            .unwrap_or_else(|| panic!("page {page} of an image of {} pages", self.shape.pages))
    }

    /// What the table says of a block. Of the last one, if it is cut short, pages beyond the
    /// table do not count.
    ///
    /// # Panics
    /// If the image has no such block.
    pub fn block(&self, block: BlockIdx) -> BlockView<'_> {
        assert!(
            block.0 < self.shape.blocks(),
            "block {block} of an image of {} pages",
            self.shape.pages
        );
        self.find(block).0
    }

    /// Whether both tables say the same of a block; at once if they share it. Of a block that
    /// neither has, yes; that only one has, no.
    pub fn same_block(&self, other: &Self, block: BlockIdx) -> bool {
        let (mine, theirs) = (self.shape.in_block(block), other.shape.in_block(block));
        if mine != theirs {
            return false;
        }
        if mine == 0 {
            return true;
        }
        match (self.find(block).0, other.find(block).0) {
            (BlockView::Uniform(a), BlockView::Uniform(b)) => a == b,
            (BlockView::Mixed(a), BlockView::Mixed(b)) => std::ptr::eq(a, b) || a == b,
            _ => false,
        }
    }

    /// How many pages each image owns, by this table.
    pub fn owners(&self) -> &Owners {
        &self.owners
    }

    /// How many pages are zero.
    pub fn zero_pages(&self) -> u64 {
        self.shape.pages - self.owners.total()
    }

    /// The longest run of one source that holds `page` and stays within `within`.
    ///
    /// # Panics
    /// If the page is not in `within`, or not in the table.
    pub fn run_at(&self, page: PageIdx, within: PageRange) -> (PageRange, Source) {
        let within = within.intersect(&self.range());
        assert!(
            within.contains(page),
            "page {page} is not in {within} of {} pages",
            self.shape.pages
        );
        walk::run_around(self, page, within)
    }

    /// The runs that `range` consists of, in order, each as long as possible. What of `range` lies
    /// beyond the table is left out.
    pub fn runs(&self, range: PageRange) -> Runs<'_> {
        Runs::new(self, range.intersect(&self.range()))
    }

    /// The first run of pages of `image` at or after `from`, as long as possible. Passes over
    /// blocks without any quickly.
    pub fn next_of(&self, image: ImageId, from: PageIdx) -> Option<PageRange> {
        walk::next_of(self, image, from)
    }

    /// The runs of pages of `image`, in order.
    pub fn pages_of(&self, image: ImageId) -> impl Iterator<Item = PageRange> {
        let mut from = PageIdx(0);
        std::iter::from_fn(move || {
            let run = self.next_of(image, from)?;
            from = run.end();
            Some(run)
        })
    }

    /// Nodes and bytes of the whole tree.
    pub fn size(&self) -> TableSize {
        size::of(self, None)
    }

    /// Nodes and bytes that `other` does not share with this table: what keeping this one
    /// besides costs.
    pub fn size_beyond(&self, other: &Self) -> TableSize {
        size::of(self, Some(other))
    }

    /// What the table says of a block, and the stretch of pages it says that of: a whole subtree
    /// where it is of one source.
    fn find(&self, block: BlockIdx) -> (BlockView<'_>, Extent) {
        self.root.find(block, self.shape)
    }
}

impl PartialEq for PageTable {
    /// Whether both say the same of every page. Shared subtrees take no time.
    fn eq(&self, other: &Self) -> bool {
        self.shape.pages == other.shape.pages && self.root.same(&other.root)
    }
}

impl Eq for PageTable {}

impl std::fmt::Debug for PageTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PageTable")
            .field("pages", &self.shape.pages)
            .field("owners", &self.owners)
            .finish_non_exhaustive()
    }
}
