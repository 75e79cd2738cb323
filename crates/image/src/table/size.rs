//! What a table costs.

use std::sync::Arc;

use super::PageTable;
use super::node::{Inner, Node};
use crate::table::MixedBlock;

/// Nodes and bytes of a table's tree, or of a part of it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TableSize {
    /// Inner nodes, of 16 slots each.
    pub inner_nodes: u64,
    /// Packed blocks.
    pub mixed_blocks: u64,
    /// Bytes of both, as asked of the allocator.
    pub heap_bytes: u64,
}

/// Two words in front of what an `Arc` holds: its counts.
const ARC_BYTES: usize = 16;

/// The size of `table`'s tree, without the nodes that `other` has in the same place.
pub(super) fn of(table: &PageTable, other: Option<&PageTable>) -> TableSize {
    let mut size = TableSize::default();
    let other = other.filter(|other| other.shape.height == table.shape.height);
    count(&table.root, other.map(|other| &other.root), &mut size);
    size
}

fn count(node: &Node, other: Option<&Node>, size: &mut TableSize) {
    match (node, other) {
        (Node::Inner(a), Some(Node::Inner(b))) if Arc::ptr_eq(a, b) => {}
        (Node::Mixed(a), Some(Node::Mixed(b))) if Arc::ptr_eq(a, b) => {}
        (Node::Uniform(_), _) => {}
        (Node::Mixed(mixed), _) => {
            size.mixed_blocks += 1;
            size.heap_bytes += (ARC_BYTES + size_of::<MixedBlock>() + mixed.heap_bytes()) as u64;
        }
        (Node::Inner(inner), _) => {
            size.inner_nodes += 1;
            size.heap_bytes += (ARC_BYTES + size_of::<Inner>()) as u64;
            for (i, slot) in inner.slots.iter().enumerate() {
                let beside = match other {
                    Some(Node::Inner(other)) => Some(&other.slots[i]),
                    _ => None,
                };
                count(slot, beside, size);
            }
        }
    }
}
