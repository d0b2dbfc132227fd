package oci

import (
	"strconv"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/internal/errdefs"
)

// The real-time signals in the numbering of C libraries, which reserve the first two.
const (
	sigRTMin = 34
	sigRTMax = 64
)

// StopSignal returns the signal that stops a container. It is the CRI config's signal, or else the
// image's, or else SIGTERM (KEP-4960). A value of the config must have passed [CheckStopSignal].
func StopSignal(asked runtimeapi.Signal, image string) syscall.Signal {
	if sig, ok := signalNumbers[asked]; ok {
		return sig
	}
	if sig, err := ParseSignal(image); err == nil {
		return sig
	}
	return unix.SIGTERM
}

// CheckStopSignal refuses a value of the config that is no signal. The signals of images are not
// checked, because the author of an image is often not the user who runs it.
func CheckStopSignal(asked runtimeapi.Signal) error {
	if _, ok := signalNumbers[asked]; !ok && asked != runtimeapi.Signal_SIGNAL_RUNTIME_DEFAULT {
		return errdefs.InvalidArgument("stop_signal: unknown value %d", asked)
	}
	return nil
}

// signalAliases are names that package unix lacks.
var signalAliases = map[string]syscall.Signal{"IOT": unix.SIGABRT, "CLD": unix.SIGCHLD, "POLL": unix.SIGIO}

// ParseSignal parses a signal in an image's notation: "SIGTERM", "term", "15", "SIGRTMIN+3",
// "RTMAX-1". The error is InvalidArgument.
func ParseSignal(text string) (syscall.Signal, error) {
	if n, err := strconv.ParseUint(text, 10, 8); err == nil && n >= 1 && n <= sigRTMax {
		return syscall.Signal(n), nil
	}
	name := strings.TrimPrefix(strings.ToUpper(text), "SIG")
	if n := unix.SignalNum("SIG" + name); n != 0 {
		return n, nil
	}
	if n, ok := signalAliases[name]; ok {
		return n, nil
	}
	if n, ok := parseRealtime(name); ok {
		return n, nil
	}
	return 0, errdefs.InvalidArgument("%q is not a signal", text)
}

// parseRealtime parses RTMIN, RTMIN+n, RTMAX and RTMAX-n.
func parseRealtime(name string) (syscall.Signal, bool) {
	base, sign := sigRTMin, 1
	rest, ok := strings.CutPrefix(name, "RTMIN")
	if !ok {
		if rest, ok = strings.CutPrefix(name, "RTMAX"); !ok {
			return 0, false
		}
		base, sign = sigRTMax, -1
	}
	if rest == "" {
		return syscall.Signal(base), true
	}
	if sign > 0 && rest[0] != '+' || sign < 0 && rest[0] != '-' {
		return 0, false
	}
	offset, err := strconv.ParseUint(rest[1:], 10, 8)
	if err != nil || offset > sigRTMax-sigRTMin {
		return 0, false
	}
	return syscall.Signal(base + sign*int(offset)), true
}

// CRISignal returns a signal for ContainerStatus, or SIGNAL_RUNTIME_DEFAULT if the CRI has no value
// for the signal.
func CRISignal(sig syscall.Signal) runtimeapi.Signal { return criSignals[sig] }

// signalNumbers and criSignals derive from the names of the CRI's values: SIGNAL_SIGTERM,
// SIGNAL_SIGRTMINPLUS1, SIGNAL_SIGRTMAXMINUS14. If two names have one number (SIGCHLD and SIGCLD),
// the lower value is reported.
var signalNumbers, criSignals = func() (map[runtimeapi.Signal]syscall.Signal, map[syscall.Signal]runtimeapi.Signal) {
	numbers := make(map[runtimeapi.Signal]syscall.Signal)
	values := make(map[syscall.Signal]runtimeapi.Signal)
	spelled := strings.NewReplacer("PLUS", "+", "MINUS", "-")
	for value, name := range runtimeapi.Signal_name {
		sig, err := ParseSignal(spelled.Replace(strings.TrimPrefix(name, "SIGNAL_")))
		if err != nil {
			continue // SIGNAL_RUNTIME_DEFAULT
		}
		s := runtimeapi.Signal(value)
		numbers[s] = sig
		if old, ok := values[sig]; !ok || s < old {
			values[sig] = s
		}
	}
	return numbers, values
}()
