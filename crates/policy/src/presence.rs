use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use vmfork_image::{PageIdx, PageRange};

/// Which pages of an image are in its cache on this host.
///
/// A page that has become present stays so for the image's life. It may become present at any
/// moment, but the one that makes it present reports it to the scheduler afterwards
/// (`Scheduler::on_filled`).
pub trait Presence {
    /// Whether the page is in the cache. Of a page that the image does not have: anything.
    fn is_present(&self, page: PageIdx) -> bool;

    /// The first run in `range` of pages that are absent: never empty, preferably as long as
    /// possible. `None` if all are present.
    fn next_absent(&self, range: PageRange) -> Option<PageRange> {
        let start = range.pages().find(|page| !self.is_present(*page))?;
        let rest = range.from_page(start);
        let end = rest.pages().find(|page| self.is_present(*page)).unwrap_or(rest.end());
        Some(rest.until_page(end))
    }
}

/// One flag per page: for tests and simulations.
impl Presence for RefCell<Vec<bool>> {
    fn is_present(&self, page: PageIdx) -> bool {
        let index = usize::try_from(page.0).ok();
        index.and_then(|index| self.borrow().get(index).copied()).unwrap_or(false)
    }
}

macro_rules! presence_behind {
    ($($pointer:ty),*) => {$(
        impl<P: Presence + ?Sized> Presence for $pointer {
            fn is_present(&self, page: PageIdx) -> bool {
                (**self).is_present(page)
            }

            fn next_absent(&self, range: PageRange) -> Option<PageRange> {
                (**self).next_absent(range)
            }
        }
    )*};
}

presence_behind!(&P, Rc<P>, Arc<P>);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absent_runs_are_found_and_end_where_pages_are_present() {
        let flags = RefCell::new(vec![true, false, false, true, false]);
        let range = |start, len| PageRange::new(PageIdx(start), len).expect("small");
        assert_eq!(flags.next_absent(range(0, 5)), Some(range(1, 2)));
        assert_eq!(flags.next_absent(range(2, 3)), Some(range(2, 1)));
        assert_eq!(flags.next_absent(range(4, 1)), Some(range(4, 1)));
        assert_eq!(flags.next_absent(range(3, 1)), None);
        assert_eq!(flags.next_absent(range(1, 0)), None);
    }
}
