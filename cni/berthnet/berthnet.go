// Package berthnet implements berth's built-in network, a CNI plugin. It sets up a bridge,
// addresses, masquerading, host ports and bandwidth limits, for IPv4, IPv6 or both.
//
// # Contract
//
// The plugin replaces bridge, host-local, portmap and bandwidth. It uses netlink and nftables and
// executes no program. It implements CNI 1.1.0 (ADD, DEL, CHECK, STATUS, GC, VERSION) for
// configurations from 0.3.0 on. The daemon calls Exec. Other runtimes execute a program that calls
// Main. Both may run at the same time.
//
// All objects on the node carry the network's key, which combines its name and the directory of its
// addresses (conf.Net.Key). A bridge belongs to one network and changes its owner under a lock of
// the node (links.Lock). So two daemons, or a daemon and another runtime, do not affect each
// other's pods. ADD refuses a bridge with pods of another network. STATUS fails whenever ADD
// would fail.
//
// The plugin may be killed at any instruction, together with the daemon. So ADD first writes the
// reservation of the addresses (package addresses), and DEL removes it last. DEL finds all objects
// of an attachment by the container ID, the interface's name and the reservation. The port's name
// derives from the container ID (package links). The reservation's note lists the host ports. If
// the note is lost, DEL finds them by the pod's addresses (package rules).
//
// The bridge and the rules for all pods belong to the node. ADD creates them when they are missing.
// Only Retire and Uninstall remove them. A flush of the whole packet filter deletes the rules, for
// example a reload of nftables.service. ADD and STATUS write the rules again, with the host ports
// of all pods from the notes of the reservations.
//
// GC releases the reservations, bridge ports and rules of attachments that are not valid.
//
// Package conf describes the configuration.
package berthnet

import (
	"cmp"
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/containernetworking/cni/pkg/skel"
	"github.com/containernetworking/cni/pkg/types"
	"github.com/containernetworking/cni/pkg/version"
	"golang.org/x/sys/unix"

	"berth/cni/berthnet/addresses"
	"berth/cni/berthnet/conf"
	"berth/cni/berthnet/rules"
)

// Versions are the supported versions of the specification.
var Versions = version.VersionsStartingFrom("0.3.0")

// Plugin is the plugin for the network namespace of its first use. Its methods may be called
// concurrently.
type Plugin struct {
	Passive bool         // STATUS changes nothing
	Log     *slog.Logger // for failures in the background; nil: discarded

	filter rules.Filter

	leaving     leaving
	leavingTime time.Duration // 0: the constant

	lockTimeout time.Duration // of the stores; 0: their default

	filters   atomic.Bool               // set when a trial or installed rules have shown that the kernel supports the rules
	tryFilter func(rules.Network) error // nil: rules.Try
}

// Open opens the plugin's sockets before the first pod needs them. An error means that pods cannot
// be attached at present.
func (p *Plugin) Open() error { return p.filter.Open() }

func (p *Plugin) log() *slog.Logger { return cmp.Or(p.Log, slog.New(slog.DiscardHandler)) }

// Close closes the plugin's sockets. It changes nothing on the node.
func (p *Plugin) Close() error {
	p.leaving.close()
	return p.filter.Close()
}

// attachment holds the arguments and open files of one call.
type attachment struct {
	*conf.Net
	plugin *Plugin
	filter *rules.Filter
	store  *addresses.Store
	id     string
	ifName string
	netns  string // path; "": the namespace is gone
	nsEnds bool   // the caller is about to remove the namespace, with the pod's device
}

func (p *Plugin) attachment(args *skel.CmdArgs, parse func(data []byte) (*conf.Net, error)) (*attachment, error) {
	n, err := parse(args.StdinData)
	if err != nil {
		return nil, err
	}
	a := p.of(n)
	a.id, a.ifName, a.netns = args.ContainerID, args.IfName, args.Netns
	return a, nil
}

// of returns an attachment without ID, for work on the whole network.
func (p *Plugin) of(n *conf.Net) *attachment {
	a := &attachment{Net: n, plugin: p, filter: &p.filter, store: addresses.Inspect(n.Dir())}
	a.store.LockTimeout = p.lockTimeout
	return a
}

// openStore opens the directory of addresses and creates it if necessary.
func (a *attachment) openStore() error {
	store, err := addresses.Open(a.Dir())
	if err != nil {
		return err
	}
	store.LockTimeout = a.store.LockTimeout
	a.store = store
	return nil
}

// asCNI converts an error to an error type of the specification.
func asCNI(err error) *types.Error {
	if e, ok := err.(*types.Error); ok { //nolint:errorlint // unwrapping would lose the text around the error
		return e
	}
	code := types.ErrInternal
	if e, ok := errors.AsType[*types.Error](err); ok { // keeps the joined errors' text
		code = e.Code
	}
	if errors.Is(err, context.DeadlineExceeded) || errors.Is(err, unix.EINTR) {
		code = types.ErrTryAgainLater
	}
	return types.NewError(code, err.Error(), "")
}
