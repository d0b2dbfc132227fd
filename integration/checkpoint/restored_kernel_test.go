package checkpoint

import (
	"fmt"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/machine"
)

// runs returns the option for a container that runs a program of testdata.
func runs(t *testing.T, name string, args ...string) harness.ContainerOption {
	t.Helper()
	path := program(t, name)
	return func(c *runtimeapi.ContainerConfig) {
		c.Command = append([]string{"/" + name}, args...)
		c.Mounts = append(c.Mounts, &runtimeapi.Mount{ContainerPath: "/" + name, HostPath: path, Readonly: true})
	}
}

// round is a line of the program objects.
type round struct{ n, inotify, memfd, shm, eventfd, signalfd, udp, unix, dup, timer int }

func rounds(t *testing.T, c *harness.Container) (list []round) {
	t.Helper()
	for _, line := range c.Log(t) {
		var r round
		_, err := fmt.Sscanf(line.Text, "round=%d inotify=%d memfd=%d shm=%d eventfd=%d signalfd=%d udp=%d unix=%d dup=%d timer=%d",
			&r.n, &r.inotify, &r.memfd, &r.shm, &r.eventfd, &r.signalfd, &r.udp, &r.unix, &r.dup, &r.timer)
		if err != nil {
			t.Fatalf("%s line %q: %v", line.Stream, line.Text, err)
		}
		list = append(list, r)
	}
	return list
}

// Kernel objects go on: inotify watches, memory in a memfd and in /dev/shm that two processes
// share, eventfd, signalfd, timers, sockets bound to names, duplicated descriptors, locks of files,
// the working directory and the umask.
func TestRestoreKeepsKernelObjects(t *testing.T) {
	for _, dir := range []string{"/watched", "/volume", "/dev/shm"} {
		t.Run("inotify of "+dir, func(t *testing.T) {
			d := startDaemon(t)
			pod := d.RunPod(t)
			c := pod.Run(t, runs(t, "objects", dir), harness.Mount(&runtimeapi.Mount{ContainerPath: "/volume", HostPath: machine.HostDir(t)}))
			harness.EventuallyTrue(t, "it works", func() bool { return len(rounds(t, c)) > 3 })
			s := save(t, pod, c)
			before := rounds(t, c)
			reached := before[len(before)-1]
			pod.Remove(t)
			restored, list := restorePod(t, d, s.identity(t))
			list[0].Start(t)
			objectsContinue(t, list[0], reached)
			restored.Remove(t)
		})
	}
}

// objectsContinue waits until the program objects has worked, and compares its lines with the last
// one before the restore.
func objectsContinue(t *testing.T, c *harness.Container, reached round) {
	t.Helper()
	var after []round
	harness.EventuallyTrue(t, "it continues", func() bool { after = rounds(t, c); return len(after) > 5 })
	if first := after[0].n; first < 4 || first > reached.n+1 {
		t.Errorf("it continues with %+v, it had reached %+v", after[0], reached)
	}
	for i, r := range after {
		n := after[0].n + i
		if want := (round{n, n, n, n, n, n, n, n, 2 * n, r.timer}); r != want {
			t.Errorf("line %d: %+v, want %+v", i, r, want)
		}
	}
	if last := after[len(after)-1]; last.timer <= after[0].timer {
		t.Errorf("the timer has stopped: %+v, %+v", after[0], last)
	}
	harness.Equal(t, "state", c.Status(t).State, runtimeapi.ContainerState_CONTAINER_RUNNING)
}

// Two containers exchange numbers, through unix sockets in a volume and through shared memory. A
// checkpoint at any moment has exactly one number in flight. So after the restore each gets the
// next number of its sequence: none is lost, and none comes twice.
func TestRestoreKeepsExchanges(t *testing.T) {
	d := startDaemon(t)
	for _, tc := range []struct {
		name       string
		one, other []string
	}{
		{"unix sockets", []string{"answer", "/shared/one", "/shared/other"}, []string{"ask", "/shared/other", "/shared/one"}},
		{"shared memory", []string{"memory", "/dev/shm/number", "0"}, []string{"memory", "/dev/shm/number", "1"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			shared := harness.Mount(&runtimeapi.Mount{ContainerPath: "/shared", HostPath: machine.HostDir(t)})
			pod := d.RunPod(t)
			list := []*harness.Container{pod.Run(t, runs(t, "peers", tc.one...), shared), pod.Run(t, runs(t, "peers", tc.other...), shared)}
			list[0].WaitOutput(t, "ready\n")
			for range 3 { // the exchange is at another point each time
				exchanged(t, list, 3)
				pod, list = revive(t, pod, list...)
				exchanged(t, list, 3)
			}
			pod.Remove(t)
		})
	}
}

// exchanged waits until both containers have got n more numbers, and checks that each number of a
// container is its last one plus 2, and that both have the same place in the sequence.
func exchanged(t *testing.T, list []*harness.Container, n int) {
	t.Helper()
	var last [2]int
	for i, c := range list {
		var numbers []int
		more := -1
		harness.EventuallyTrue(t, "numbers come", func() bool {
			numbers = nil
			for _, line := range c.Log(t) {
				if line.Text != "ready" {
					var number int
					harness.Get(fmt.Sscan(line.Text, &number))(t)
					numbers = append(numbers, number)
				}
			}
			if more < 0 {
				more = len(numbers) + n
			}
			return len(numbers) >= more
		})
		for k, number := range numbers {
			if number != numbers[0]+2*k {
				t.Fatalf("container %d has got %v", i, numbers)
			}
		}
		last[i] = numbers[len(numbers)-1]
	}
	if (last[0]+last[1])%2 != 1 {
		t.Errorf("both containers have got numbers of the same sequence: %v", last)
	}
}
