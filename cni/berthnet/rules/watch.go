package rules

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"strings"

	"github.com/mdlayher/netlink"
	"github.com/mdlayher/netlink/nlenc"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// Watch calls deleted whenever a network's table may have been deleted, and first when it begins to watch, until ctx ends. An error says why that cannot be noticed.
func Watch(ctx context.Context, deleted func()) error {
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{Groups: 1 << (unix.NFNLGRP_NFTABLES - 1)})
	if err != nil {
		return fmt.Errorf("watch nftables: %w", err)
	}
	closed := make(chan error, 1)
	stop := context.AfterFunc(ctx, func() { closed <- conn.Close() })
	err = watch(conn, deleted)
	if stop() {
		return errors.Join(fmt.Errorf("watch nftables: %w", err), conn.Close())
	}
	return <-closed
}

func watch(conn *netlink.Conn, deleted func()) error {
	program, err := bpf.Assemble(deletions)
	if err != nil {
		return err
	}
	if err := conn.SetBPF(program); err != nil {
		return err
	}
	deleted()
	for {
		messages, err := conn.Receive()
		switch {
		case errors.Is(err, unix.ENOBUFS): // some were lost
			deleted()
		case err != nil:
			return err
		case anyTableDeleted(messages):
			deleted()
		}
	}
}

const (
	deleteTable     = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_DELTABLE
	deleteChain     = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_DELCHAIN
	deleteRule      = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_DELRULE
	deleteSet       = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_DELSET
	deleteObject    = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_DELOBJ
	deleteFlowtable = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_DELFLOWTABLE
)

// deletions lets through what a transaction may begin with that deletes a table. Host ports that come and go, and others' elements, of
// which a busy node has many, wake nobody. The type is in the order of the machine, and a program loads in the network's.
var deletions = []bpf.Instruction{
	bpf.LoadAbsolute{Off: 4, Size: 2},
	bpf.JumpIf{Cond: bpf.JumpEqual, Val: asLoaded(deleteTable), SkipTrue: 6},
	bpf.JumpIf{Cond: bpf.JumpEqual, Val: asLoaded(deleteObject), SkipTrue: 5},
	bpf.JumpIf{Cond: bpf.JumpEqual, Val: asLoaded(deleteFlowtable), SkipTrue: 4},
	bpf.JumpIf{Cond: bpf.JumpEqual, Val: asLoaded(deleteChain), SkipTrue: 3},
	bpf.JumpIf{Cond: bpf.JumpEqual, Val: asLoaded(deleteRule), SkipTrue: 2},
	bpf.JumpIf{Cond: bpf.JumpEqual, Val: asLoaded(deleteSet), SkipTrue: 1},
	bpf.RetConstant{Val: 0},
	bpf.RetConstant{Val: 0xffffffff},
}

func asLoaded(kind uint16) uint32 { return uint32(binary.BigEndian.Uint16(nlenc.Uint16Bytes(kind))) }

// anyTableDeleted looks for tables of networks.
func anyTableDeleted(messages []netlink.Message) bool {
	for _, m := range messages {
		const header = 4 // nfgenmsg
		if m.Header.Type != deleteTable || len(m.Data) < header {
			continue
		}
		d, err := netlink.NewAttributeDecoder(m.Data[header:])
		for err == nil && d.Next() {
			if d.Type() == unix.NFTA_TABLE_NAME && strings.HasPrefix(d.String(), TablePrefix) {
				return true
			}
		}
	}
	return false
}
