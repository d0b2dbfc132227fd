// Package census counts in the background what is too expensive to be counted when somebody
// asks: what containers have written, and what their processes have open.
//
// # Contract
//
// One container is counted after the other, on a thread of the lowest priority and for a tenth of
// the time, whatever is in a container. Who asks gets what was counted last, from memory.
// What nobody asks for is counted seldom, and what is in a pod that has used no CPU time since the last count is
// counted again only when that is ten minutes old.
// Containers are seen through a sequence of Subjects; what is known of one is in its Ledger,
// which the container owns. Nothing here changes, holds or waits for a container.
package census
