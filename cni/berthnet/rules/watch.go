package rules

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"os"
	"strings"
	"time"

	"github.com/mdlayher/netlink"
	"github.com/mdlayher/netlink/nlenc"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"
)

// Watch calls restore at its start and whenever another program may have deleted a network's table,
// until ctx ends. It retries a failed restore after a pause. It returns an error if it cannot watch
// deletions.
func Watch(ctx context.Context, restore func() error) error {
	conn, err := netlink.Dial(unix.NETLINK_NETFILTER, &netlink.Config{Groups: 1 << (unix.NFNLGRP_NFTABLES - 1)})
	if err != nil {
		return fmt.Errorf("watch nftables: %w", err)
	}
	closed := make(chan error, 1)
	stop := context.AfterFunc(ctx, func() { closed <- conn.Close() })
	err = watch(conn, restore)
	if stop() {
		return errors.Join(fmt.Errorf("watch nftables: %w", err), conn.Close())
	}
	return <-closed
}

func watch(conn *netlink.Conn, restore func() error) error {
	program, err := bpf.Assemble(deletions())
	if err != nil {
		return err
	}
	if err := conn.SetBPF(program); err != nil {
		return err
	}
	var due backoff
	for {
		if err := conn.SetReadDeadline(due.after(restore())); err != nil {
			return err
		}
		if err := awaitDeletion(conn); err != nil {
			return err
		}
	}
}

// awaitDeletion waits until a table may have been deleted, or until the connection's deadline.
func awaitDeletion(conn *netlink.Conn) error {
	for {
		messages, err := conn.Receive()
		switch {
		// messages were lost, or the deadline has passed
		case errors.Is(err, unix.ENOBUFS), errors.Is(err, os.ErrDeadlineExceeded):
			return nil
		case err != nil:
			return err
		case anyTableDeleted(messages):
			return nil
		}
	}
}

// backoff computes the growing pauses between retries.
type backoff struct{ pause time.Duration }

const (
	firstPause = 100 * time.Millisecond
	lastPause  = 30 * time.Second
)

// after returns the time of the next attempt, the zero time after a success.
func (b *backoff) after(outcome error) time.Time {
	if outcome == nil {
		b.pause = 0
		return time.Time{}
	}
	b.pause = min(max(2*b.pause, firstPause), lastPause)
	return time.Now().Add(b.pause)
}

const deleteTable = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_DELTABLE

// lookedAt is how many messages of a packet the socket filter inspects. The kernel combines
// messages of a transaction, up to a page (Linux 5.8). A longer program would exceed the socket's
// limit (net.core.optmem_max, 20 KiB before Linux 6.7).
const lookedAt = 32

// deletions returns a socket filter. It accepts packets with the deletion of a table among their
// first messages, and packets with more messages than it inspects. So changes of host ports and of
// other programs' elements do not wake the watcher.
func deletions() []bpf.Instruction {
	const type_ = 4 // offset of the message type, after the length
	program := []bpf.Instruction{bpf.LoadConstant{Dst: bpf.RegX, Val: 0}}
	for range lookedAt {
		program = append(program,
			bpf.LoadIndirect{Off: type_, Size: 2}, // a load beyond the packet's end ends the program and drops the packet
			bpf.JumpIf{Cond: bpf.JumpNotEqual, Val: asLoaded(deleteTable), SkipTrue: 1},
			bpf.RetConstant{Val: math.MaxUint32})
		program = append(program, nextMessage()...)
	}
	// The packet has more messages: accept it.
	return append(program, bpf.LoadIndirect{Off: type_, Size: 2}, bpf.RetConstant{Val: math.MaxUint32})
}

// nextMessage adds the aligned length of the message at X to X. Lengths and types are in host byte
// order, but BPF loads in network byte order. Lengths above 64 KiB do not occur in a packet.
func nextMessage() []bpf.Instruction {
	const at, length = 0, 1 // indexes of scratch memory
	program := []bpf.Instruction{bpf.TXA{}, bpf.StoreScratch{Src: bpf.RegA, N: at}}
	if asLoaded(1) == 1 {
		program = append(program, bpf.LoadIndirect{Off: 2, Size: 2})
	} else {
		program = append(program,
			bpf.LoadIndirect{Off: 0, Size: 2},
			bpf.StoreScratch{Src: bpf.RegA, N: length},
			bpf.ALUOpConstant{Op: bpf.ALUOpShiftRight, Val: 8},
			bpf.TAX{},
			bpf.LoadScratch{Dst: bpf.RegA, N: length},
			bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: 0xff},
			bpf.ALUOpConstant{Op: bpf.ALUOpShiftLeft, Val: 8},
			bpf.ALUOpX{Op: bpf.ALUOpOr})
	}
	return append(program,
		bpf.ALUOpConstant{Op: bpf.ALUOpAdd, Val: unix.NLMSG_ALIGNTO - 1},
		bpf.ALUOpConstant{Op: bpf.ALUOpAnd, Val: ^uint32(unix.NLMSG_ALIGNTO - 1)},
		bpf.LoadScratch{Dst: bpf.RegX, N: at},
		bpf.ALUOpX{Op: bpf.ALUOpAdd},
		bpf.TAX{})
}

func asLoaded(kind uint16) uint32 { return uint32(binary.BigEndian.Uint16(nlenc.Uint16Bytes(kind))) }

// anyTableDeleted reports whether a network's table was deleted.
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
