package rules

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The rules of iptables-legacy (x_tables), which nftables does not tell of. They are read as iptables itself reads them, by two socket options (linux/netfilter_ipv4/ip_tables.h,
// linux/netfilter_ipv6/ip6_tables.h): what a table has, and all of its rules as the kernel has them.

// legacyFamily is how the rules of a family are read. Offsets and sizes are in bytes, of architectures of 64 bits.
type legacyFamily struct {
	tool     string // that changes them
	names    string // file with the names of the tables that this namespace has
	domain   int
	level    int
	address  int // of the family, in bytes; a rule begins with source, destination and their masks
	ruleSize int // struct ipt_entry, ip6t_entry
	targetAt int // where in it is the offset of its target, and after that its size with all that it has
}

var legacyFamilies = []legacyFamily{
	{"iptables-legacy", "/proc/thread-self/net/ip_tables_names", unix.AF_INET, unix.SOL_IP, 4, 112, 88},
	{"ip6tables-legacy", "/proc/thread-self/net/ip6_tables_names", unix.AF_INET6, unix.SOL_IPV6, 16, 168, 140},
}

const (
	legacyGetInfo    = 64 // IPT_SO_GET_INFO
	legacyGetEntries = 65 // IPT_SO_GET_ENTRIES

	legacyInfoSize   = 84 // struct ipt_getinfo: name, hooks, 5 entries, 5 policies, number and size of all rules
	legacyPolicies   = 56
	legacyTotalSize  = 80
	legacyHeaderSize = 40 // struct ipt_get_entries: name, size, alignment
	legacySize       = 32

	legacyTable   = "filter"
	legacyForward = 2       // NF_INET_FORWARD
	legacyMost    = 1 << 28 // bytes of rules that are looked at

	legacyTarget = 32     // struct xt_entry_target, which the verdict of a standard one follows; its name is after 2 bytes
	legacyDrop   = -1     // -NF_DROP - 1
	maskedNames  = 4 * 16 // names of the interfaces by which a packet comes and goes, and the masks of both
	ifNameSize   = 16     // IFNAMSIZ
)

// blockingLegacy is Blocking for rules of iptables-legacy. Nothing is asked of a namespace that has none: the kernel would make the table.
func blockingLegacy(bridge string, subnets []netip.Prefix) (all []Blocker, err error) {
	for _, f := range legacyFamilies {
		if !hasFamily(subnets, f.address == 4) {
			continue
		}
		table, err := f.read()
		if err != nil {
			return nil, fmt.Errorf("read the rules of %s: %w", f.tool, err)
		}
		if table == nil {
			continue
		}
		drops, knows, err := f.judge(table, bridge, subnets)
		if err != nil {
			return nil, fmt.Errorf("read the rules of %s: %w", f.tool, err)
		}
		if drops && !knows {
			all = append(all, Blocker{Chain: f.tool + " " + legacyTable + " FORWARD", Tool: f.tool})
		}
	}
	return all, nil
}

// legacyRules are those of a table, as the kernel has them, and where among them FORWARD's policy is.
type legacyRules struct {
	rules  []byte
	policy int
}

// read returns nil where the namespace has no such table.
func (f *legacyFamily) read() (*legacyRules, error) {
	names, err := os.ReadFile(f.names)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if !slices.Contains(strings.Fields(string(names)), legacyTable) {
		return nil, nil
	}
	socket, err := unix.Socket(f.domain, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0) // any socket of the family will do
	if errors.Is(err, unix.EAFNOSUPPORT) {
		return nil, nil // ipv6.disable=1
	}
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	defer unix.Close(socket)
	for range Attempts {
		table, err := f.ask(socket)
		if !errors.Is(err, unix.EAGAIN) { // else the table has another size by now
			return table, err
		}
	}
	return nil, unix.EAGAIN
}

func (f *legacyFamily) ask(socket int) (*legacyRules, error) {
	info := make([]byte, legacyInfoSize)
	copy(info, legacyTable)
	if err := getsockopt(socket, f.level, legacyGetInfo, info); err != nil {
		return nil, err
	}
	size := binary.NativeEndian.Uint32(info[legacyTotalSize:])
	if size > legacyMost {
		return nil, fmt.Errorf("they have %d bytes", size)
	}
	entries := make([]byte, legacyHeaderSize+int(size))
	copy(entries, legacyTable)
	binary.NativeEndian.PutUint32(entries[legacySize:], size)
	if err := getsockopt(socket, f.level, legacyGetEntries, entries); err != nil {
		return nil, err
	}
	return &legacyRules{entries[legacyHeaderSize:], int(binary.NativeEndian.Uint32(info[legacyPolicies+4*legacyForward:]))}, nil
}

// getsockopt fills data, which says what is asked for.
func getsockopt(socket, level, option int, data []byte) error {
	size := uint32(len(data))
	_, _, errno := unix.Syscall6(unix.SYS_GETSOCKOPT, uintptr(socket), uintptr(level), uintptr(option), uintptr(unsafe.Pointer(&data[0])), uintptr(unsafe.Pointer(&size)), 0)
	if errno != 0 {
		return os.NewSyscallError("getsockopt", errno)
	}
	return nil
}

var errLegacyTorn = errors.New("they are not as expected")

// judge tells whether FORWARD drops what none of its rules accepts, and whether a rule of the table is about the bridge or a subnet.
func (f *legacyFamily) judge(t *legacyRules, bridge string, subnets []netip.Prefix) (drops, knows bool, err error) {
	seen := false
	for at := 0; at < len(t.rules); {
		rule := t.rules[at:]
		if len(rule) < f.ruleSize {
			return false, false, errLegacyTorn
		}
		target, next := int(binary.NativeEndian.Uint16(rule[f.targetAt:])), int(binary.NativeEndian.Uint16(rule[f.targetAt+2:]))
		if target < f.ruleSize || next < target+legacyTarget || next > len(rule) {
			return false, false, errLegacyTorn
		}
		if at == t.policy {
			seen, drops = true, isLegacyDrop(rule[target:next])
		}
		knows = knows || f.isAbout(rule, bridge, subnets)
		at += next
	}
	if !seen {
		return false, false, errLegacyTorn
	}
	return drops, knows, nil
}

// isLegacyDrop tells whether a target is the standard one, which has no name, with the verdict to drop.
func isLegacyDrop(target []byte) bool {
	return len(target) >= legacyTarget+4 && target[2] == 0 && int32(binary.NativeEndian.Uint32(target[legacyTarget:])) == legacyDrop
}

// isAbout tells whether a rule compares with an interface's name, its beginning included, or with the address of a subnet.
func (f *legacyFamily) isAbout(rule []byte, bridge string, subnets []netip.Prefix) bool {
	names := rule[4*f.address:][:maskedNames]
	for i := range 2 {
		if isMaskedName(names[i*ifNameSize:][:ifNameSize], names[(i+2)*ifNameSize:][:ifNameSize], bridge) {
			return true
		}
	}
	for i := range 2 {
		address, mask := rule[i*f.address:][:f.address], rule[(i+2)*f.address:][:f.address]
		if slices.ContainsFunc(subnets, func(s netip.Prefix) bool { return isMaskedSubnet(address, mask, s) }) {
			return true
		}
	}
	return false
}

// isMaskedName compares as the kernel does; a mask of nothing is for any interface.
func isMaskedName(name, mask []byte, ifName string) bool {
	var wanted [ifNameSize]byte
	copy(wanted[:], ifName)
	some := false
	for i := range wanted {
		if mask[i] == 0 {
			continue
		}
		some = true
		if (name[i]^wanted[i])&mask[i] != 0 {
			return false
		}
	}
	return some
}

func isMaskedSubnet(address, mask []byte, s netip.Prefix) bool {
	want := s.Masked().Addr().AsSlice()
	if len(want) != len(address) || !bytes.Equal(address, want) {
		return false
	}
	for bit := range 8 * len(mask) {
		if on := mask[bit/8]&(0x80>>(bit%8)) != 0; on != (bit < s.Bits()) {
			return false
		}
	}
	return true
}
