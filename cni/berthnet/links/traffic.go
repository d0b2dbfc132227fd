package links

import (
	"encoding/binary"
	"fmt"
	"math"
	"os"

	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"berth/internal/failpoint"
)

// tc limits a pod's traffic at its port, like the CNI plugin bandwidth. Traffic to the pod queues
// at the port. Traffic from the pod is redirected to an ifb device, queues there, and returns.

// Limit is a limit of traffic. Its zero value means no limit.
type Limit struct {
	Rate  uint64 // bytes per second
	Burst uint64 // bytes
}

// shaperPrefix is the prefix of the names of shapers: ifb devices that limit traffic from pods.
const shaperPrefix = "vifb"

// ShaperName returns the name of an attachment's shaper. Only pods with an egress limit have a
// shaper.
func ShaperName(id, ifName string) string {
	return shaperPrefix + PortName(id, ifName)[len(Prefix):]
}

// Handles of qdiscs (linux/pkt_sched.h).
const (
	handleIngress = 0xffff0000
	parentIngress = 0xfffffff1 // TC_H_INGRESS
	parentRoot    = 0xffffffff // TC_H_ROOT
	handleRoot    = 0x00010000
)

// addIngress adds a qdisc for incoming packets. The interface must be down, because otherwise the
// kernel waits for all processors.
func (b *batch) addIngress(index int) {
	b.add("redirect traffic from the pod (CONFIG_NET_SCH_INGRESS)", unix.RTM_NEWQDISC, unix.NLM_F_CREATE|unix.NLM_F_EXCL,
		tcMessage(index, handleIngress, parentIngress, 0), nl.NewRtAttr(nl.TCA_KIND, nl.ZeroTerminated("ingress")))
}

// redirect sends all packets that arrive at an interface to another one. The classifier is a
// classic BPF program with one instruction, which accepts each packet.
func (b *batch) redirect(index, to int) {
	program := binary.NativeEndian.AppendUint16(nil, unix.BPF_RET|unix.BPF_K)
	program = binary.NativeEndian.AppendUint32(append(program, 0, 0), math.MaxUint32)
	options := nl.NewRtAttr(nl.TCA_OPTIONS, nil)
	options.AddRtAttr(nl.TCA_BPF_OPS_LEN, nl.Uint16Attr(1))
	options.AddRtAttr(nl.TCA_BPF_OPS, program)
	const redirect, stolen = 1, 4 // TCA_EGRESS_REDIR, TC_ACT_STOLEN
	action := options.AddRtAttr(nl.TCA_BPF_ACT, nil).AddRtAttr(1, nil)
	action.AddRtAttr(nl.TCA_ACT_KIND, nl.ZeroTerminated("mirred"))
	action.AddRtAttr(nl.TCA_ACT_OPTIONS, nil).AddRtAttr(nl.TCA_MIRRED_PARMS,
		words(0, 0, stolen, 0, 0, redirect, uint32(to)))
	info := 1<<16 | uint32(nl.Swap16(unix.ETH_P_ALL)) // priority and protocol
	b.add("limit traffic from the pod (CONFIG_NET_CLS_BPF)", unix.RTM_NEWTFILTER, unix.NLM_F_CREATE|unix.NLM_F_EXCL,
		tcMessage(index, 0, handleIngress, info), nl.NewRtAttr(nl.TCA_KIND, nl.ZeroTerminated("bpf")), options)
}

// queueTime is the longest time of a packet in the queue, in milliseconds. The kernel drops packets
// that would wait longer. minQueue is the size of the largest packet before segmentation.
const (
	queueTime = 25
	minQueue  = 128 << 10
)

// limit queues packets that leave through an interface (qdisc tbf).
func (b *batch) limit(index int, l Limit) {
	rate := uint32(min(l.Rate, math.MaxUint32))
	burst := uint32(min(l.Burst, math.MaxUint32))
	queue := uint32(min(max(l.Rate/1000*queueTime, minQueue), math.MaxUint32))
	const ethernet = 1 // TC_LINKLAYER_ETHERNET
	// tc_tbf_qopt: rate, no peak rate, limit; TCA_TBF_BURST replaces the buffer
	parameters := append([]byte{0, ethernet, 0, 0}, words(0, rate, 0, 0, 0, queue, 0, 0)...)
	options := nl.NewRtAttr(nl.TCA_OPTIONS, nil)
	options.AddRtAttr(nl.TCA_TBF_PARMS, parameters)
	options.AddRtAttr(nl.TCA_TBF_BURST, nl.Uint32Attr(burst))
	if l.Rate > math.MaxUint32 {
		options.AddRtAttr(nl.TCA_TBF_RATE64, nl.Uint64Attr(l.Rate))
	}
	b.add("limit the pod's traffic", unix.RTM_NEWQDISC, unix.NLM_F_CREATE|unix.NLM_F_EXCL,
		tcMessage(index, handleRoot, parentRoot, 0), nl.NewRtAttr(nl.TCA_KIND, nl.ZeroTerminated("tbf")), options)
}

func tcMessage(index int, handle, parent, info uint32) *nl.TcMsg {
	return &nl.TcMsg{Family: unix.AF_UNSPEC, Ifindex: int32(index), Handle: handle, Parent: parent, Info: info}
}

func words(all ...uint32) (data []byte) {
	for _, w := range all {
		data = binary.NativeEndian.AppendUint32(data, w)
	}
	return data
}

// makeShaper makes the shaper and returns its index.
func (a *Attachment) makeShaper() (index int, err error) {
	shaper := ShaperName(a.ContainerID, a.IfName)
	info := nl.NewRtAttr(unix.IFLA_LINKINFO, nil)
	info.AddRtAttr(unix.IFLA_INFO_KIND, []byte("ifb"))
	var host batch
	host.add("make ifb "+shaper, unix.RTM_NEWLINK, unix.NLM_F_CREATE|unix.NLM_F_EXCL, nl.NewIfInfomsg(unix.AF_UNSPEC),
		name(shaper), number(unix.IFLA_MTU, a.MTU), number(unix.IFLA_NUM_TX_QUEUES, 1), number(unix.IFLA_NUM_RX_QUEUES,
			1), info)
	host.add("name ifb "+shaper, unix.RTM_NEWLINK, 0, nl.NewIfInfomsg(unix.AF_UNSPEC),
		name(shaper), nl.NewRtAttr(unix.IFLA_IFALIAS, []byte(alias(a.Network, a.ContainerID, a.IfName))), withoutAddresses())
	failpoint.Reach("net.make-shaper")
	err = host.do()
	failpoint.Reach("net.shaper-made")
	if err != nil {
		return 0, err
	}
	return indexOf(shaper)
}

// setUpShaper sets the shaper up with its limit.
func (a *Attachment) setUpShaper(index int) error {
	var host batch
	host.limit(index, a.Egress)
	host.add("set up ifb", unix.RTM_NEWLINK, 0, up(index))
	failpoint.Reach("net.set-up-shaper")
	err := host.do()
	failpoint.Reach("net.shaper-set-up")
	return err
}

// limitTraffic adds limits to the port, which is down.
func (a *Attachment) limitTraffic(host *batch, port int) error {
	if a.Ingress.Rate > 0 {
		host.limit(port, a.Ingress)
	}
	if a.Egress.Rate == 0 {
		return nil
	}
	shaper, err := a.makeShaper()
	if err != nil {
		return err
	}
	if err := a.setUpShaper(shaper); err != nil {
		return err
	}
	host.addIngress(port)
	host.redirect(port, shaper)
	return nil
}

// indexOf returns the index of an interface in the thread's network namespace, or 0 if it does not
// exist. It does not need the RTNL lock.
func indexOf(ifName string) (index int, err error) {
	request, err := unix.NewIfreq(ifName)
	if err != nil {
		return 0, fmt.Errorf("interface %q: %w", ifName, err)
	}
	socket, err := unix.Socket(unix.AF_UNIX, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, os.NewSyscallError("socket", err)
	}
	defer unix.Close(socket)
	switch err := unix.IoctlIfreq(socket, unix.SIOCGIFINDEX, request); err {
	case nil:
		return int(request.Uint32()), nil
	case unix.ENODEV:
		return 0, nil
	default:
		return 0, fmt.Errorf("find interface %s: %w", ifName, err)
	}
}
