package links

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"berth/internal/lockfile"
	"berth/internal/netns"
)

// A bridge says whose it is when it is there. One that somebody else has made at the same time is not taken for our own.
func TestNewBridge(t *testing.T) {
	for _, quicker := range []bool{false, true} {
		err := netns.InNew(func() error {
			if quicker {
				if err := netlink.LinkAdd(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: "bn0"}}); err != nil {
					return err
				}
			}
			returned, err := newBridge(&Description{Name: "bn0", Network: "net-1"})
			if err != nil {
				return err
			}
			there, err := FindBridge("bn0")
			if err != nil {
				return err
			}
			for _, b := range []*Bridge{returned, there} {
				if owner, made := b.owner(); owner != "net-1" || made == quicker {
					return fmt.Errorf("it is %q's, made %v", owner, made)
				}
			}
			return nil
		})
		if err != nil {
			t.Errorf("the bridge, with somebody being quicker %v: %v", quicker, err)
		}
	}
}

// Who wants the lock for himself has it as soon as those have it no more who had it when he came.
func TestLockIsFair(t *testing.T) {
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	first, err := Lock(t.Context(), lockfile.Shared)
	if err != nil {
		t.Fatal(err)
	}
	alone := make(chan func(), 1)
	go func() {
		unlock, err := Lock(t.Context(), lockfile.Exclusive)
		if err != nil {
			t.Error(err)
		}
		alone <- unlock
	}()
	for deadline := time.Now().Add(30 * time.Second); ; {
		second, err := Lock(gone, lockfile.Shared)
		if errors.Is(err, context.Canceled) {
			break
		}
		if err != nil || time.Now().After(deadline) {
			t.Fatalf("others get the lock all the time; %v", err)
		}
		second()
	}
	first()
	(<-alone)()
	last, err := Lock(t.Context(), lockfile.Shared)
	if err != nil {
		t.Fatal(err)
	}
	last()
}

// Whoever has the lock and is stuck does not stop others for ever, who say which lock it is.
func TestLockIsNotWaitedForInVain(t *testing.T) {
	unlock, err := Lock(t.Context(), lockfile.Exclusive)
	if err != nil {
		t.Fatal(err)
	}
	for _, mode := range []lockfile.Mode{lockfile.Shared, lockfile.Exclusive} {
		_, err := lockWithin(t.Context(), mode, time.Millisecond)
		if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), lockPath) {
			t.Errorf("with mode %d: %v", mode, err)
		}
	}
	unlock()
	unlock, err = Lock(t.Context(), lockfile.Exclusive)
	if err != nil {
		t.Fatal(err)
	}
	unlock()
}

// What the kernel lacks for checking what pods send is found out.
func TestTryClassifier(t *testing.T) {
	for kind, want := range map[string]error{classifier: nil, "nothing": unix.ENOENT} {
		if err := tryClassifier(kind); !errors.Is(err, want) {
			t.Errorf("classifier %q: %v, want %v", kind, err, want)
		}
	}
	if err := CanCheckSource(); err != nil {
		t.Error(err)
	}
}
