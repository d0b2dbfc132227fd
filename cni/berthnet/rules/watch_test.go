package rules

import (
	"encoding/binary"
	"fmt"
	"slices"
	"testing"

	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"berth/internal/testutil"
)

// packet returns a netlink packet with messages of these types and of different lengths.
func packet(types ...uint16) (data []byte) {
	for i, t := range types {
		body := make([]byte, 5+i) // not aligned
		data = binary.NativeEndian.AppendUint32(data, uint32(unix.NLMSG_HDRLEN+len(body)))
		data = binary.NativeEndian.AppendUint16(data, t)
		data = append(data, make([]byte, unix.NLMSG_HDRLEN-6)...)
		data = append(data, body...)
		for len(data)%unix.NLMSG_ALIGNTO != 0 {
			data = append(data, 0)
		}
	}
	return data
}

// The filter passes a deletion of a table at any place in a packet, and packets with too many
// messages.
func TestFilterPassesDeletions(t *testing.T) {
	t.Parallel()
	vm, err := bpf.NewVM(deletions())
	testutil.Must(t, err)
	const add, element = unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_NEWTABLE, unix.NFNL_SUBSYS_NFTABLES<<8 | unix.NFT_MSG_DELSETELEM
	additions := func(n int) []uint16 { return slices.Repeat([]uint16{add}, n) }
	for _, c := range []struct {
		types []uint16
		pass  bool
	}{
		{nil, false},
		{[]uint16{deleteTable}, true},
		{[]uint16{add}, false},
		{[]uint16{element, add, element}, false},
		{[]uint16{add, deleteTable}, true},
		{[]uint16{add, element, deleteTable, add}, true},
		{additions(lookedAt - 1), false},
		{append(additions(lookedAt-1), deleteTable), true},
		{additions(lookedAt), false},
		{additions(lookedAt + 1), true},
		{append(additions(2*lookedAt), deleteTable), true},
	} {
		t.Run(fmt.Sprint(c.types), func(t *testing.T) {
			n, err := vm.Run(packet(c.types...))
			if err != nil || (n > 0) != c.pass {
				t.Errorf("messages %s: %d bytes pass, %v; want pass: %v", fmt.Sprintf("%x", c.types), n, err, c.pass)
			}
		})
	}
	for _, torn := range [][]byte{{1}, packet(add)[:unix.NLMSG_HDRLEN-11], packet(add, deleteTable)[:len(packet(add))+5]} {
		if n, err := vm.Run(torn); err != nil || n > 0 {
			t.Errorf("truncated packet of %d bytes: %d pass; %v", len(torn), n, err)
		}
	}
}

// A message of length 0 must not cause an endless loop.
func TestDeletionsOfEmptyMessage(t *testing.T) {
	t.Parallel()
	vm, err := bpf.NewVM(deletions())
	testutil.Must(t, err)
	if n, err := vm.Run(make([]byte, 64)); err != nil || n == 0 {
		t.Errorf("%d bytes pass; %v", n, err)
	}
}
