// Package packages tests the Debian package on a node with systemd and kubelet. contrib/guest
// -packages builds two versions of the package. It runs the test in a guest, because an
// installation changes the machine.
package packages
