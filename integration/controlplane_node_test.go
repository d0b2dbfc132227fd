package integration

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"berth/integration/harness"
)

// cluster is a control plane with one node, whose kubelet runs pods on berth. It has neither
// kube-proxy nor DNS, because no test needs services.
type cluster struct {
	*node
	dir string
}

const (
	adminToken    = "admin"
	apiserverPort = "6443"
)

// startCluster starts etcd, apiserver, controllers, scheduler and a node, and waits until pods can
// be created. When the test ends, it deletes all pods and checks for leftovers of kubelet and the
// daemon.
func startCluster(t *testing.T) *cluster {
	t.Helper()
	for _, name := range []string{"etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl"} {
		kubernetesProgram(t, name)
	}
	n := newNode(t, clusterKubelet)
	c := &cluster{node: n, dir: n.dir + "/cluster"}
	harness.Must(t, os.Mkdir(c.dir, 0o700))
	c.writeKeys(t)
	c.startControlPlane(t)
	n.flags = []string{"--kubeconfig", c.kubeconfig()}
	n.start(t)
	t.Cleanup(func() { n.stop(t) })
	t.Cleanup(func() {
		c.kubectl(t, "delete", "deployments,jobs,pods", "--all", "--wait=false")
		n.awaitEmpty(t)
	})
	n.kubelet.waitFor(t, "the node is ready", func() error {
		return c.check("wait", "--for=condition=Ready", "--timeout=1s", "node/"+kubeletNode)
	})
	n.kubelet.waitFor(t, "the default service account exists", func() error { return c.check("get", "serviceaccount", "default") })
	return c
}

const clusterKubelet = `maxPods: 150
kubeAPIQPS: 200
kubeAPIBurst: 400
`

// writeKeys writes the certificates and keys of the programs and their accounts.
func (c *cluster) writeKeys(t *testing.T) {
	t.Helper()
	key := harness.Get(rsa.GenerateKey(rand.Reader, 2048))(t)
	der := harness.Get(x509.MarshalPKCS8PrivateKey(key))(t)
	harness.Must(t, os.WriteFile(c.accountKey(), pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), 0o600))
	harness.Must(t, os.WriteFile(c.dir+"/tokens", []byte(adminToken+",admin,admin,system:masters\n"), 0o600))
	harness.Must(t, os.WriteFile(c.kubeconfig(), fmt.Appendf(nil, `apiVersion: v1
kind: Config
clusters: [{name: test, cluster: {server: "https://127.0.0.1:%s", insecure-skip-tls-verify: true}}]
users: [{name: admin, user: {token: %s}}]
contexts: [{name: test, context: {cluster: test, user: admin}}]
current-context: test
`, apiserverPort, adminToken), 0o600))
}

func (c *cluster) accountKey() string { return c.dir + "/account.key" }
func (c *cluster) kubeconfig() string { return c.dir + "/kubeconfig" }

// startControlPlane starts the programs in the order of their dependencies. Each must answer before
// the next starts.
func (c *cluster) startControlPlane(t *testing.T) {
	t.Helper()
	etcd := c.startPart(t, "etcd", "--data-dir", c.dir+"/etcd", "--unsafe-no-fsync",
		"--listen-client-urls", "http://127.0.0.1:2379", "--advertise-client-urls", "http://127.0.0.1:2379",
		"--listen-peer-urls", "http://127.0.0.1:2380")
	etcd.waitFor(t, "etcd is healthy", func() error { return healthy("http://127.0.0.1:2379/health") })

	// The apiserver creates its own certificate.
	apiserver := c.startPart(t, "kube-apiserver", "--etcd-servers", "http://127.0.0.1:2379", "--cert-dir", c.dir+"/certs",
		"--secure-port", apiserverPort, "--bind-address", "127.0.0.1", "--advertise-address", kubeletAddress,
		"--service-cluster-ip-range", "10.96.0.0/16", "--token-auth-file", c.dir+"/tokens", "--authorization-mode", "AlwaysAllow",
		"--service-account-issuer", "https://kubernetes.default.svc", "--allow-privileged",
		"--service-account-key-file", c.accountKey(), "--service-account-signing-key-file", c.accountKey(),
		"--kubelet-preferred-address-types", "InternalIP")
	apiserver.waitFor(t, "apiserver is ready", func() error { return c.check("get", "--raw", "/readyz") })

	c.startPart(t, "kube-controller-manager", "--kubeconfig", c.kubeconfig(), "--leader-elect=false",
		"--service-account-private-key-file", c.accountKey(), "--root-ca-file", c.dir+"/certs/apiserver.crt",
		"--kube-api-qps", "200", "--kube-api-burst", "400")
	c.startPart(t, "kube-scheduler", "--kubeconfig", c.kubeconfig(), "--leader-elect=false",
		"--kube-api-qps", "200", "--kube-api-burst", "400")
}

func (c *cluster) startPart(t *testing.T, name string, args ...string) *program {
	t.Helper()
	p := startProgram(t, name, c.dir+"/"+name+".log", append([]string{kubernetesProgram(t, name)}, args...)...)
	t.Cleanup(func() { p.finish(t) })
	t.Cleanup(func() { p.stop(t) })
	return p
}

func healthy(url string) error {
	client := http.Client{Timeout: harness.Patience, Transport: &http.Transport{DisableKeepAlives: true}}
	answer, err := client.Get(url)
	if err != nil {
		return err
	}
	if answer.StatusCode != http.StatusOK {
		err = fmt.Errorf("%s: %s", url, answer.Status)
	}
	_ = answer.Body.Close() // only the status code matters
	return err
}

// --- kubectl --------------------------------------------------------------------

// command returns a kubectl command line, killed when ctx ends.
func (c *cluster) command(ctx context.Context, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, os.Getenv(kubernetesEnv)+"/kubectl", append([]string{"--kubeconfig", c.kubeconfig()}, args...)...)
	cmd.Env = append(os.Environ(), "HOME="+c.dir) // directory of kubectl's cache
	return cmd
}

// try runs kubectl with the given input and returns its output.
func (c *cluster) try(input string, args ...string) (stdout, stderr string, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), kubeletPatience)
	defer cancel()
	cmd := c.command(ctx, args...)
	cmd.Stdin = strings.NewReader(input)
	var out, complaint bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &complaint
	err = cmd.Run()
	return out.String(), complaint.String(), err
}

// kubectl runs kubectl and returns its output. It fails the test on an error.
func (c *cluster) kubectl(t *testing.T, args ...string) string {
	t.Helper()
	return c.kubectlInput(t, "", args...)
}

func (c *cluster) kubectlInput(t *testing.T, input string, args ...string) string {
	t.Helper()
	stdout, stderr, err := c.try(input, args...)
	if err != nil {
		t.Fatalf("kubectl %s: %v\n%s%s", strings.Join(args, " "), err, stdout, stderr)
	}
	return stdout
}

// check runs kubectl and returns an error with its complete output.
func (c *cluster) check(args ...string) error {
	stdout, stderr, err := c.try("", args...)
	if err != nil {
		err = fmt.Errorf("kubectl %s: %w: %s%s", args[0], err, stdout, stderr)
	}
	return err
}

// create creates an object from a manifest. IMAGE in it is replaced with the base image.
func (c *cluster) create(t *testing.T, manifest string) {
	t.Helper()
	c.kubectlInput(t, strings.ReplaceAll(manifest, "IMAGE", harness.BaseImage), "create", "-f", "-")
}

// wait waits for a condition as in kubectl wait --for.
func (c *cluster) wait(t *testing.T, object, condition string) {
	t.Helper()
	c.kubectl(t, "wait", "--for="+condition, fmt.Sprintf("--timeout=%v", kubeletPatience-time.Second), object)
}

// readObject reads an object from the API.
func (c *cluster) readObject(t *testing.T, into any, args ...string) {
	t.Helper()
	harness.Must(t, json.Unmarshal([]byte(c.kubectl(t, append([]string{"get", "-o", "json"}, args...)...)), into))
}
