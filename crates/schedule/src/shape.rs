//! Trees: the way of a shard to its owner, and of the result from there.
//!
//! Nodes are *groups* of ranks (hosts, or single ranks). A shard is reduced along a tree whose root is its owner, and spread from there.
//! Ring, tree and direct differ in the tree alone:
//!
//! | shape | reduce | spread | messages behind each other, one way |
//! | --- | --- | --- | --- |
//! | ring | a chain around the ring that ends at the owner | a chain that begins there | n − 1 |
//! | tree | a binary tree | the same | log₂ n |
//! | direct | everyone sends to the owner | the owner sends to everyone | 1 |
//!
//! Whatever the tree, a node sends as many messages for a shard as it has neighbours in it (reducing and spreading together), and
//! receives as many. All shapes therefore move 2(n − 1) times the data in all; which node carries how much of it is a question of
//! who is in the middle of how many trees.

/// The shape of the trees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Shape {
    /// Everyone sends to the owner, who sends to everyone.
    Direct,
    /// Everyone sends everything to everyone, and all are owners of everything: one message instead of two behind each other, for
    /// few bytes. AllReduce alone.
    OneShot,
    /// A chain around the ring.
    Ring,
    /// A binary tree, turned so that the owner is its root.
    Tree,
}

/// An order of the nodes, and the shape of the trees over it.
#[derive(Clone, Debug)]
pub(crate) struct Forest {
    shape: Shape,
    /// Nodes by position.
    order: Vec<usize>,
    /// Positions by node.
    position: Vec<usize>,
}

/// A neighbour in a tree, and when the message to or from it goes: messages of a lower level come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Edge {
    pub node: usize,
    pub level: usize,
}

impl Forest {
    /// `order` is a permutation of the nodes.
    pub fn new(shape: Shape, order: Vec<usize>) -> Forest {
        let mut position = vec![0; order.len()];
        for (p, node) in order.iter().enumerate() {
            position[*node] = p;
        }
        Forest { shape, order, position }
    }

    pub fn nodes(&self) -> usize {
        self.order.len()
    }

    /// Steps from the root along the order, 0 at the root.
    fn distance(&self, root: usize, node: usize) -> usize {
        let n = self.nodes();
        (self.position[node] + n - self.position[root]) % n
    }

    fn at(&self, root: usize, distance: usize) -> usize {
        self.order[(self.position[root] + distance) % self.nodes()]
    }

    /// Where a node sends what it has reduced. `None` at the root.
    pub fn towards(&self, root: usize, node: usize) -> Option<Edge> {
        let n = self.nodes();
        let d = self.distance(root, node);
        if d == 0 {
            return None;
        }
        Some(match self.shape {
            Shape::Direct | Shape::OneShot => Edge { node: root, level: 0 },
            Shape::Ring => Edge { node: self.at(root, (d + 1) % n), level: d - 1 },
            Shape::Tree => Edge { node: self.at(root, (d - 1) / 2), level: depth(n - 1) - depth(d) },
        })
    }

    /// From where a node receives what was reduced before it, in the order of levels.
    pub fn before(&self, root: usize, node: usize) -> Vec<Edge> {
        let n = self.nodes();
        let d = self.distance(root, node);
        match self.shape {
            Shape::Direct | Shape::OneShot if d > 0 => Vec::new(),
            Shape::Direct | Shape::OneShot => {
                (0..n).filter(|x| *x != root).map(|node| Edge { node, level: 0 }).collect()
            }
            // the chain begins behind the root
            Shape::Ring if d == 1 || n == 1 => Vec::new(),
            Shape::Ring => vec![Edge { node: self.at(root, (d + n - 1) % n), level: (d + n - 2) % n }],
            Shape::Tree => {
                let mut sons: Vec<Edge> = (2 * d + 1..(2 * d + 3).min(n))
                    .map(|s| Edge { node: self.at(root, s), level: depth(n - 1) - depth(s) })
                    .collect();
                sons.sort_by_key(|s| s.level);
                sons
            }
        }
    }

    /// From where a node gets the result. `None` at the root.
    pub fn source(&self, root: usize, node: usize) -> Option<Edge> {
        let d = self.distance(root, node);
        if d == 0 {
            return None;
        }
        Some(match self.shape {
            Shape::Direct | Shape::OneShot => Edge { node: root, level: 0 },
            Shape::Ring => Edge { node: self.at(root, d - 1), level: d - 1 },
            Shape::Tree => Edge { node: self.at(root, (d - 1) / 2), level: depth(d) - 1 },
        })
    }

    /// To where a node passes the result on.
    pub fn after(&self, root: usize, node: usize) -> Vec<Edge> {
        let n = self.nodes();
        let d = self.distance(root, node);
        match self.shape {
            Shape::Direct | Shape::OneShot if d > 0 => Vec::new(),
            Shape::Direct | Shape::OneShot => (1..n).map(|k| Edge { node: self.at(root, k), level: 0 }).collect(),
            Shape::Ring if d + 1 == n => Vec::new(),
            Shape::Ring => vec![Edge { node: self.at(root, d + 1), level: d }],
            Shape::Tree => {
                (2 * d + 1..(2 * d + 3).min(n)).map(|s| Edge { node: self.at(root, s), level: depth(s) - 1 }).collect()
            }
        }
    }

    /// The nodes that a node sends to or receives from, for this root; some may be named twice.
    pub fn neighbours(&self, root: usize, node: usize) -> Vec<usize> {
        if self.shape == Shape::OneShot {
            return (0..self.nodes()).filter(|x| *x != node).collect();
        }
        let edges = self.towards(root, node).into_iter().chain(self.source(root, node));
        edges.chain(self.before(root, node)).chain(self.after(root, node)).map(|e| e.node).collect()
    }

    /// Whether a node may have several messages of one level for one neighbour.
    pub fn repeats_within_level(&self) -> bool {
        self.shape == Shape::Tree
    }
}

/// The depth of the node with this number in a binary heap.
fn depth(number: usize) -> usize {
    (number + 1).ilog2() as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Both ends of every edge know of it, and agree on its level; every node reaches the root, along rising levels.
        #[test]
        fn trees_are_trees_from_both_ends(
            shape in prop::sample::select(vec![Shape::Direct, Shape::Ring, Shape::Tree]),
            order in (1usize..20).prop_flat_map(|n| Just((0..n).collect::<Vec<_>>()).prop_shuffle()),
            root in any::<prop::sample::Index>(),
        ) {
            let n = order.len();
            let root = root.index(n);
            let forest = Forest::new(shape, order);
            let mut degree = 0;
            for node in 0..n {
                let up = forest.towards(root, node);
                prop_assert_eq!(up.is_none(), node == root);
                for edge in forest.before(root, node) {
                    prop_assert_eq!(forest.towards(root, edge.node), Some(Edge { node, level: edge.level }));
                    prop_assert!(up.is_none_or(|up| edge.level < up.level));
                    prop_assert!(edge.level < n);
                    degree += 1;
                }
                let from = forest.source(root, node);
                prop_assert_eq!(from.is_none(), node == root);
                for edge in forest.after(root, node) {
                    prop_assert_eq!(forest.source(root, edge.node), Some(Edge { node, level: edge.level }));
                    prop_assert!(from.is_none_or(|from| edge.level > from.level));
                    prop_assert!(edge.level < n);
                    degree += 1;
                }
            }
            prop_assert_eq!(degree, 2 * (n - 1));
        }
    }
}
