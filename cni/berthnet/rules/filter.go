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

// Filter is the packet filter of the network namespace of its first use. Its methods may be called
// concurrently.
//
// It keeps its sockets open, because closing an nftables socket takes 15 ms or more. The kernel
// waits until all deleted objects are freed (nft_rcv_nl_event).
type Filter struct {
	mu sync.Mutex // one transaction at a time, as in the kernel
	// +checklocks:mu
	conn *nftables.Conn // nil: not open

	flows sync.Mutex
	// +checklocks:flows
	conntrack *netlink.Conn // nil: not open
}

// bufferSize has room for a transaction with the host ports of all pods of a node, and for its
// acknowledgements. The kernel allocates memory only for buffered data.
const bufferSize = 16 << 20

func bigBuffers(conn *netlink.Conn) error {
	return errors.Join(conn.SetWriteBuffer(bufferSize), conn.SetReadBuffer(bufferSize))
}

// with runs requests on the socket. After an error it closes the socket, because a late answer
// could be mistaken for the answer to the next request.
func (f *Filter) with(run func(*nftables.Conn) error) (err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
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

// +checklocks:f.mu
func (f *Filter) drop() error {
	if f.conn == nil {
		return nil
	}
	err := f.conn.CloseLasting()
	f.conn = nil
	return err
}

// ErrGone means that another program deleted a network's table during an operation, as "nft flush
// ruleset" does. The caller installs the table again.
var ErrGone = errors.New("the packet filter rules were deleted meanwhile")

// Attempts limits the retries of an operation after another program deleted a table.
const Attempts = 5

// retry runs do again if another program deleted a table meanwhile.
func retry(do func() error) (err error) {
	for range Attempts {
		if err = do(); !isMissing(err) {
			return err
		}
	}
	return err
}

// isMissing reports whether an error is ENOENT. The library does not wrap all of the kernel's
// errors.
func isMissing(err error) bool {
	return err != nil && (errors.Is(err, unix.ENOENT) || strings.Contains(err.Error(), unix.ENOENT.Error()))
}

// withFlows runs requests on the conntrack socket.
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

// Open opens the sockets before their first use.
func (f *Filter) Open() error {
	return errors.Join(f.Available(), f.withFlows(func(*netlink.Conn) error { return nil }))
}

// Close closes the sockets. The Filter may be used again.
func (f *Filter) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.flows.Lock()
	defer f.flows.Unlock()
	var err error
	if f.conntrack != nil {
		err = f.conntrack.Close()
		f.conntrack = nil
	}
	return errors.Join(err, f.drop())
}
