package integration

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/gorilla/websocket"
	"github.com/moby/spdystream/spdy"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/encoding/prototext"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	"google.golang.org/protobuf/reflect/protoregistry"
	"k8s.io/client-go/tools/remotecommand"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"berth/integration/harness"
	"berth/integration/sessions"
)

// method is one RPC of CRI.
type method struct {
	name, path    string
	input, output protoreflect.MessageType
	stream        bool // the server streams its answers; no RPC of CRI has a client stream
}

// methods returns all RPCs of both services, in the order of the API.
func methods(t testing.TB) (all []method) {
	t.Helper()
	for _, service := range []grpc.ServiceDesc{runtimeapi.RuntimeService_ServiceDesc, runtimeapi.ImageService_ServiceDesc} {
		descriptor, err := protoregistry.GlobalFiles.FindDescriptorByName(protoreflect.FullName(service.ServiceName))
		if err != nil {
			t.Fatal(err)
		}
		list := descriptor.(protoreflect.ServiceDescriptor).Methods()
		if registered := len(service.Methods) + len(service.Streams); registered != list.Len() {
			t.Fatalf("%s: %d RPCs are served, the API has %d", service.ServiceName, registered, list.Len())
		}
		for i := range list.Len() {
			m := list.Get(i)
			all = append(all, method{
				name: string(m.Name()), path: fmt.Sprintf("/%s/%s", service.ServiceName, m.Name()), stream: m.IsStreamingServer(),
				input: messageType(t, m.Input()), output: messageType(t, m.Output()),
			})
		}
	}
	return all
}

func messageType(t testing.TB, d protoreflect.MessageDescriptor) protoreflect.MessageType {
	t.Helper()
	found, err := protoregistry.GlobalTypes.FindMessageByName(d.FullName())
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// fuzzUserNamespace is the first host ID of the pod with a user namespace.
const fuzzUserNamespace = 21 * usernsLength

// fuzzPods are the kinds of pods in which the fuzz tests send requests.
var fuzzPods = []harness.PodOption{harness.HostNetwork, func(*runtimeapi.PodSandboxConfig) {}, userNamespace(fuzzUserNamespace)}

// world is a daemon with a pod, a container, and the objects that requests create.
type world struct {
	d     *harness.Daemon
	conn  *grpc.ClientConn
	r     *rand.Rand
	valid bool // all requests are valid

	pod            *harness.Pod // requests may have removed it
	podIDs, ctrIDs []string     // including objects that requests created
}

func newWorld(t *testing.T, seed uint64) *world {
	t.Helper()
	d := harness.StartDaemon(t)
	w := &world{d: d, conn: harness.RawConn(t, d), r: rand.New(rand.NewPCG(seed, 0)), valid: seed == 0}
	w.pod = d.RunPod(t, fuzzPods[seed%uint64(len(fuzzPods))])
	w.podIDs, w.ctrIDs = []string{w.pod.Id}, []string{w.pod.Run(t, w.containerOptions()).Id}
	return w
}

// containerOptions returns the option that a container of the pod needs.
func (w *world) containerOptions() harness.ContainerOption {
	if w.pod.Config.Linux.SecurityContext.NamespaceOptions.UsernsOptions != nil {
		return inUserNamespace(fuzzUserNamespace)
	}
	return func(*runtimeapi.ContainerConfig) {}
}

func pick[T any](r *rand.Rand, all []T) T { return all[r.IntN(len(all))] }

// newRequest returns a request that is valid except for its IDs.
func (w *world) newRequest(t *testing.T, m method) proto.Message {
	t.Helper()
	image := &runtimeapi.ImageSpec{Image: harness.BaseImage}
	limits := &runtimeapi.LinuxContainerResources{CpuShares: 100, CpuPeriod: 100000, CpuQuota: 50000, MemoryLimitInBytes: 64 << 20}
	switch m.name {
	case "RunPodSandbox":
		return &runtimeapi.RunPodSandboxRequest{Config: w.d.PodConfig(t, pick(w.r, fuzzPods))}
	case "CreateContainer":
		config := w.pod.ContainerConfig(w.containerOptions())
		harness.Must(t, os.MkdirAll(filepath.Dir(filepath.Join(w.pod.Config.LogDirectory, config.LogPath)), 0o755))
		return &runtimeapi.CreateContainerRequest{PodSandboxId: w.pod.Id, Config: config, SandboxConfig: w.pod.Config}
	case "ExecSync":
		return &runtimeapi.ExecSyncRequest{Cmd: []string{"true"}, Timeout: 1}
	case "Exec":
		return &runtimeapi.ExecRequest{Cmd: []string{"echo", "x"}, Stdout: true}
	case "Attach":
		return &runtimeapi.AttachRequest{Stdout: true}
	case "PortForward":
		return &runtimeapi.PortForwardRequest{Port: []int32{8080}}
	case "UpdateContainerResources":
		return &runtimeapi.UpdateContainerResourcesRequest{Linux: limits}
	case "UpdatePodSandboxResources":
		return &runtimeapi.UpdatePodSandboxResourcesRequest{Overhead: limits, Resources: limits}
	case "PullImage":
		return &runtimeapi.PullImageRequest{Image: image}
	case "RemoveImage":
		return &runtimeapi.RemoveImageRequest{Image: image}
	case "ImageStatus":
		return &runtimeapi.ImageStatusRequest{Image: image}
	}
	return m.input.New().Interface()
}

// request returns the next request for an RPC. Most have unusual values, which confine keeps within
// the bounds of the test.
func (w *world) request(t *testing.T, m method) proto.Message {
	t.Helper()
	request := proto.Clone(w.newRequest(t, m)) // the request may share the pod's config
	w.setIDs(request.ProtoReflect())
	if !w.valid && request.ProtoReflect().Descriptor().Fields().Len() > 0 {
		scramble(request.ProtoReflect(), w.r)
		if w.r.IntN(4) > 0 { // otherwise few requests pass the check of their first field
			w.setIDs(request.ProtoReflect())
		}
	}
	w.confine(request)
	return request
}

// setIDs sets IDs of existing objects.
func (w *world) setIDs(m protoreflect.Message) {
	fields := m.Descriptor().Fields()
	for i := range fields.Len() {
		field := fields.Get(i)
		var ids []string
		switch {
		case field.Name() == "container_id":
			ids = w.ctrIDs
		case field.Name() == "pod_sandbox_id" && m.Descriptor().Name() != "CreateContainerRequest": // its config must match its pod
			ids = w.podIDs
		case field.Name() == "filter" && m.Has(field):
			w.setIDs(m.Mutable(field).Message())
			continue
		case field.Name() == "id":
			ids = slices.Concat(w.podIDs, w.ctrIDs)
		default:
			continue
		}
		m.Set(field, protoreflect.ValueOfString(pick(w.r, ids)))
	}
}

// confine limits a request to the test's directories, cgroups and registry, and shortens its
// timeouts.
func (w *world) confine(request proto.Message) {
	switch request := request.(type) {
	case *runtimeapi.RunPodSandboxRequest:
		if request.Config != nil {
			confinePod(w.d, request.Config)
		}
	case *runtimeapi.CreateContainerRequest:
		if request.Config != nil {
			confineContainer(w.d, request.Config, w.r)
		}
	case *runtimeapi.StopContainerRequest:
		request.Timeout = min(request.Timeout, 1)
	case *runtimeapi.ExecSyncRequest:
		request.Timeout = min(request.Timeout, 1)
	case *runtimeapi.PullImageRequest:
		if name := request.GetImage().GetImage(); name != "" && name != harness.BaseImage {
			request.Image.Image = pick(w.r, []string{harness.Registry.Host + "/", "127.0.0.1:1/", harness.BaseImage}) + name
		}
	}
}

// send sends a request, records the created objects, and checks the answer.
func (w *world) send(t *testing.T, m method, request proto.Message) {
	t.Helper()
	limit := harness.Patience
	if m.name == "GetContainerEvents" {
		limit = 100 * time.Millisecond // an endless stream
	}
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	answer := m.output.New().Interface()
	err := w.exchange(ctx, m, request, answer)
	t.Logf("%s {%.400s}: %s", m.name, prototext.MarshalOptions{}.Format(request), harness.CodeOf(err))
	if m.name == "GetContainerEvents" && harness.CodeOf(err) == codes.DeadlineExceeded {
		return
	}
	fits(t, m.name, err)
	if err == nil {
		w.recordObjects(t, answer)
	}
}

// exchange makes a call and reads all answers of a stream.
func (w *world) exchange(ctx context.Context, m method, request, answer proto.Message) error {
	if !m.stream {
		return w.conn.Invoke(ctx, m.path, request, answer)
	}
	stream, err := w.conn.NewStream(ctx, &grpc.StreamDesc{ServerStreams: true}, m.path)
	if err != nil {
		return err
	}
	if err := errors.Join(stream.SendMsg(request), stream.CloseSend()); err != nil {
		return err
	}
	for {
		if err := stream.RecvMsg(answer); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return err
		}
	}
}

// recordObjects records the objects in an answer, and uses its URL.
func (w *world) recordObjects(t *testing.T, answer proto.Message) {
	t.Helper()
	switch answer := answer.(type) {
	case *runtimeapi.RunPodSandboxResponse:
		w.podIDs = append(w.podIDs, answer.PodSandboxId)
		w.d.Objects = append(w.d.Objects, answer.PodSandboxId)
	case *runtimeapi.CreateContainerResponse:
		w.ctrIDs = append(w.ctrIDs, answer.ContainerId)
		w.d.Objects = append(w.d.Objects, answer.ContainerId)
	case *runtimeapi.ExecResponse:
		w.useURL(t, answer.Url)
	case *runtimeapi.AttachResponse:
		w.useURL(t, answer.Url)
	case *runtimeapi.PortForwardResponse:
		w.useURL(t, answer.Url)
	}
}

// enough is the number of requests to one daemon. The fuzzer allows ten seconds for a program.
const enough = 24

// FuzzOtherRPCs sends unusual requests for all RPCs to one daemon, one after the other. Each byte
// of the program selects an RPC. The seed selects its unusual fields. At the end the test removes
// all objects and checks for leaks.
//
//	go test -tags seccomp -exec contrib/machine ./integration -run '^$' -fuzz FuzzOtherRPCs
func FuzzOtherRPCs(f *testing.F) {
	all := methods(f)
	inOrder := make([]byte, len(all))
	for i := range all {
		inOrder[i] = byte(i)
	}
	for seed := range uint64(4) { // first without unusual values, then each kind of pod
		for program := range slices.Chunk(shuffled(inOrder, seed), enough) {
			f.Add(program, seed)
		}
	}
	f.Fuzz(func(t *testing.T, program []byte, seed uint64) {
		w := newWorld(t, seed)
		for _, which := range program[:min(len(program), enough)] {
			m := all[int(which)%len(all)]
			w.send(t, m, w.request(t, m))
		}
		// The daemon must answer after any request.
		harness.Get(w.d.Cri.Status(t.Context(), true))(t)
		for _, p := range harness.Get(w.d.Cri.ListPodSandbox(t.Context(), nil))(t) {
			harness.Get(w.d.Cri.PodSandboxStatus(t.Context(), p.Id, true))(t)
		}
		for _, c := range harness.Get(w.d.Cri.ListContainers(t.Context(), nil))(t) {
			harness.Get(w.d.Cri.ContainerStatus(t.Context(), c.Id, true))(t)
		}
	})
}

func shuffled(b []byte, seed uint64) []byte {
	b = slices.Clone(b)
	rand.New(rand.NewPCG(seed, 1)).Shuffle(len(b), func(i, j int) { b[i], b[j] = b[j], b[i] })
	return b
}

// sessionTime limits a session of the fuzzer, because some sessions never end.
const sessionTime = 300 * time.Millisecond

// unusualPorts are ports that a client may request after it has connected for a port-forward.
var unusualPorts = []string{"8080", "0", "-1", "65536", "4294967376", "http", "", "80 ", "0x50", strings.Repeat("9", 500)}

// useURL uses a session URL of the daemon in a more or less valid way. The answer must be HTTP
// without a server error. The leak check at the end of the test finds leftovers.
func (w *world) useURL(t *testing.T, address string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), sessionTime)
	defer cancel()
	text := strings.ToValidUTF8(pick(w.r, unusualStrings), "?")
	switch w.r.IntN(6) {
	case 0: // no connection
	case 1:
		stream(ctx, sessions.Spdy, address, w.streamOptions(text))
	case 2:
		stream(ctx, sessions.WebSocket, address, w.streamOptions(text))
	case 3:
		w.speakSPDY(address, text)
	case 4:
		w.forwardWebSocket(ctx, address, text)
	case 5:
		w.plainRequests(ctx, t, address, text)
	}
}

// streamOptions returns options that may differ from the options of the RPC.
func (w *world) streamOptions(input string) remotecommand.StreamOptions {
	o := remotecommand.StreamOptions{Tty: w.r.IntN(3) == 0}
	if w.r.IntN(2) == 0 {
		o.Stdin = strings.NewReader(input)
	}
	if w.r.IntN(3) > 0 {
		o.Stdout = io.Discard
	}
	if w.r.IntN(3) == 0 {
		o.Stderr = io.Discard
	}
	return o
}

// stream runs a session until its command or the deadline ends it.
func stream(ctx context.Context, p sessions.Protocol, address string, o remotecommand.StreamOptions) {
	_, _ = p.Stream(ctx, sessions.Plain(), address, o)
}

// speakSPDY opens streams of any session with unusual headers, without waiting for answers. The
// server may refuse them.
func (w *world) speakSPDY(address, text string) {
	u, err := url.Parse(address)
	if err != nil {
		return
	}
	conn, err := net.DialTimeout("tcp", u.Host, sessionTime)
	if err != nil {
		return
	}
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(sessionTime))
	protocol := pick(w.r, []string{"portforward.k8s.io", "v4.channel.k8s.io", "v2.channel.k8s.io", "none"})
	fmt.Fprintf(conn, "POST %s HTTP/1.1\r\nHost: %s\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: %s\r\n\r\n", u.Path, u.Host, protocol)
	answer, err := http.ReadResponse(bufio.NewReader(conn), nil)
	if err != nil || answer.StatusCode != http.StatusSwitchingProtocols {
		return
	}
	framer, err := spdy.NewFramer(conn, conn)
	if err != nil {
		return
	}
	id := spdy.StreamId(1)
	for request := range 1 + w.r.IntN(3) {
		headers := http.Header{"Port": {pick(w.r, unusualPorts)}, "Requestid": {pick(w.r, []string{fmt.Sprint(request), text})}}
		// The streams of a port-forward come in pairs. After the first stream of a pair the server
		// waits for the second, and so would this test.
		for _, kind := range pick(w.r, [][]string{{"error", "data"}, {"error", "data"}, {"error", "stdin"}, {"error", "stdout", "resize"}, {text}}) {
			headers.Set("streamType", kind)
			_ = framer.WriteFrame(&spdy.SynStreamFrame{StreamId: id, Headers: headers})
			_ = framer.WriteFrame(&spdy.DataFrame{StreamId: id, Data: []byte(text), Flags: spdy.DataFlags(w.r.IntN(2))})
			id += 2
		}
	}
	_, _ = io.Copy(io.Discard, conn)
}

// headerText quotes a string so that the client library accepts it as a header.
func headerText(s string) string { return fmt.Sprintf("%q", s) }

// forwardWebSocket opens any session as if it were a port-forward, and sends unusual messages.
func (w *world) forwardWebSocket(ctx context.Context, address, text string) {
	dialer := websocket.Dialer{Subprotocols: []string{pick(w.r, []string{"v4.channel.k8s.io", "v5.channel.k8s.io", "base64.channel.k8s.io", "portforward.k8s.io", "none"})}}
	query := url.Values{"port": {pick(w.r, unusualPorts), text}, "command": {text}, "tty": {text}}
	conn, answer, err := dialer.DialContext(ctx, "ws"+strings.TrimPrefix(address, "http")+"?"+query.Encode(), nil)
	if err != nil {
		return
	}
	defer conn.Close()
	defer answer.Body.Close()
	for _, channel := range []byte{byte(w.r.IntN(6)), 255} {
		kind := pick(w.r, []int{websocket.BinaryMessage, websocket.TextMessage, websocket.PingMessage})
		if conn.WriteMessage(kind, append([]byte{channel}, text[:min(len(text), 100)]...)) != nil {
			return
		}
	}
}

// plainRequests sends requests that start no session.
func (w *world) plainRequests(ctx context.Context, t *testing.T, address, text string) {
	t.Helper()
	for _, address := range []string{address + "x", address + "?" + url.Values{"port": {text}, "command": {text}}.Encode(), address} {
		method := pick(w.r, []string{http.MethodGet, http.MethodPost, http.MethodPut, "ODD"})
		request := harness.Get(http.NewRequestWithContext(ctx, method, address, bytes.NewBufferString(text)))(t)
		request.Header.Set("Connection", "Upgrade")
		request.Header.Set("Upgrade", pick(w.r, []string{"SPDY/3.1", "websocket", "h2c", headerText(text)}))
		request.Header.Set("X-Stream-Protocol-Version", headerText(text))
		answer, err := (&http.Transport{DisableKeepAlives: true}).RoundTrip(request)
		if err != nil {
			continue // the deadline has passed
		}
		if answer.StatusCode >= http.StatusInternalServerError {
			t.Errorf("%s with %q: %s", method, request.Header, answer.Status)
		}
		_ = answer.Body.Close()
	}
}
