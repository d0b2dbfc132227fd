package rules

import (
	"errors"
	"fmt"
	"strings"
	"sync"

	"github.com/google/nftables"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Filter is the packet filter of the network namespace in which it is first used. Its methods may be called concurrently.
//
// It keeps its sockets: when one is closed, the kernel has the closer wait until what was deleted before, by
// anybody, is freed (nft_rcv_nl_event), and that takes 15 ms or more.
type Filter struct {
	turn  sync.Mutex     // of conn: one transaction after the other, as in the kernel
	conn  *nftables.Conn // nil: not open
	flows sync.Mutex     // of conntrack
	// conntrack asks the kernel about connections; nil: not open
	conntrack *netlink.Conn
}

// bufferSize is room for a transaction with the host ports of all pods of a node, and for its acknowledgements. The kernel takes memory only for what
// is in a buffer.
const bufferSize = 16 << 20

func bigBuffers(conn *netlink.Conn) error {
	return errors.Join(conn.SetWriteBuffer(bufferSize), conn.SetReadBuffer(bufferSize))
}

// with runs what asks the kernel. A socket with which something has failed is not used again: answers to one
// question must not be taken for those to the next.
func (f *Filter) with(run func(*nftables.Conn) error) (err error) {
	f.turn.Lock()
	defer f.turn.Unlock()
	if f.conn == nil {
		if f.conn, err = nftables.New(nftables.AsLasting(), nftables.WithSockOptions(bigBuffers)); err != nil {
			return fmt.Errorf("open nftables: %w", err)
		}
	}
	if err := run(f.conn); err != nil {
		return errors.Join(err, f.drop())
	}
	return nil
}

func (f *Filter) drop() error {
	if f.conn == nil {
		return nil
	}
	err := f.conn.CloseLasting()
	f.conn = nil
	return err
}

// ErrGone says that somebody has deleted a network's table in the middle of something (nft flush ruleset): it is to be installed again.
var ErrGone = errors.New("the packet filter's rules were deleted meanwhile")

// Attempts is how often something is done that others' deletions keep from being done.
const Attempts = 5

// again repeats what looks at tables, and then fails because somebody has deleted them since.
func again(do func() error) (err error) {
	for range Attempts {
		if err = do(); !isMissing(err) {
			return err
		}
	}
	return err
}

// isMissing tells that something is not there. The library does not wrap every error of the kernel's.
func isMissing(err error) bool {
	return err != nil && (errors.Is(err, unix.ENOENT) || strings.Contains(err.Error(), unix.ENOENT.Error()))
}

// withFlows runs what asks the kernel about connections.
func (f *Filter) withFlows(run func(*netlink.Conn) error) (err error) {
	f.flows.Lock()
	defer f.flows.Unlock()
	if f.conntrack == nil {
		if f.conntrack, err = netlink.Dial(unix.NETLINK_NETFILTER, nil); err != nil {
			return fmt.Errorf("open conntrack: %w", err)
		}
	}
	if err := run(f.conntrack); err != nil {
		err = errors.Join(err, f.conntrack.Close())
		f.conntrack = nil
		return err
	}
	return nil
}

// Open opens the sockets, which is done by whoever needs them first, too.
func (f *Filter) Open() error {
	return errors.Join(f.Available(), f.withFlows(func(*netlink.Conn) error { return nil }))
}

// Close closes the sockets. The Filter may be used again.
func (f *Filter) Close() error {
	f.turn.Lock()
	defer f.turn.Unlock()
	f.flows.Lock()
	defer f.flows.Unlock()
	var err error
	if f.conntrack != nil {
		err = f.conntrack.Close()
		f.conntrack = nil
	}
	return errors.Join(err, f.drop())
}
